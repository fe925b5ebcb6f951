"""Workers that train: settings in, a run folder with events, checkpoints and a result out."""
