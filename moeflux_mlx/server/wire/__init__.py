"""The JSON and event streams of each API, to and from the one request and the one stream of events."""
