"""Reports: tables, figures and drawings from run folders and predictions."""
