"""Plans, the graphs they are made of and the machines they are made for, as plain values."""
