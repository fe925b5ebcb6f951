"""What a job may say: its settings as plain values, each default once, and the YAML file at the edge."""
