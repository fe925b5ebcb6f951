"""The live page: a run that goes on in, a page that follows it out. The server only reads the run's files."""
