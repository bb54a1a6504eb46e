"""What an answer will cost before it is asked for: costs of passes, measured, times how many.

`costs` holds the seconds of a model's passes and `measure` measures them; `work` says which passes
an answer takes, `model` for a setting that is planned and `recorded` for one that has run;
`acceptance` reads from recorded runs what a plan has to assume otherwise; `advice` says what to
take. Nothing here is loaded by `import specguard_chains`.
"""
