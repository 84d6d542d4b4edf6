"""The network: backbone, ASPP head, growing classifiers, and their files."""
