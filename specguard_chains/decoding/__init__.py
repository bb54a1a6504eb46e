"""The heart: decoding in verified steps. Knows tokens, arrays and text, and no framework."""
