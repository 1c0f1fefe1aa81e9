"""Tool calls as models write them: dialects, their parsers, and the reader of an answer."""
