"""Tool calls, reasoning and structured answers as text: forms, grammars, a reader, choices."""
