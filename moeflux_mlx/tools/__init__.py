"""Programs that use an engine: evaluation of models, checks of the machine, the search for tiles and pool sizes."""
