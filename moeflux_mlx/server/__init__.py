"""A model behind HTTP: the wire forms of three APIs over one kind of request and one stream of events."""
