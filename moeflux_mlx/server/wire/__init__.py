"""The JSON and event streams of each API, translated to and from `Request` and events."""
