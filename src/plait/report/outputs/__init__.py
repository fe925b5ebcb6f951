"""What a report is written as: an HTML page, a trace, tables and a picture."""
