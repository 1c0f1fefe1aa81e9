"""Programs that use an engine: evaluation of models, checks of the machine, trials of tiles."""
