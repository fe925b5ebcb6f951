"""Changes of a running job: its members, its batch size, and the placement of its layers."""
