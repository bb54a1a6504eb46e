"""Measuring decoders on problems with known answers.

Problems come from files or from the hub (`problems`); answers are compared by math-verify in a
process of its own (`checking`); decoders take turns on each problem, resumably (`runner`); the
figures come with their uncertainty (`statistics`, `summary`). Nothing here is loaded by
`import specguard_chains`.
"""
