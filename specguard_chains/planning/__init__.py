"""What an answer will cost before it is asked for: costs of passes, measured, times how many.

`costs` holds the seconds of a model's passes and `measure` measures them; `work` says which passes
an answer takes, `model` for a setting that is planned and `recorded` for one that has run;
`acceptance` reads from recorded runs what a plan has to assume otherwise; `advice` says what to
take for time alone. `goals` chooses among recorded arms, also by how often they are right, and
`arm_options` says how to set one. Nothing here is loaded by `import specguard_chains`.
"""
