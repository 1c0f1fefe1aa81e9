"""How floats become codes: functions on arrays. They know no checkpoint, no file and no model."""
