"""What changes while a run goes on: its members, its batches, and where the layers of its model are."""
