"""What is read from run folders and predictions and shown to people: tables, figures, drawings."""
