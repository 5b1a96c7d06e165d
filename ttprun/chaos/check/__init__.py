"""`ttprun check`: some steps of the user's own script, with a rank killed at several moments. Begin with `checkup`.

Files, lowest floor first: `plan` (which moments), `working_copy` (where a run writes), `notes` (what ranks have noted),
`trial` (one launch), `verdict` (what each kill came to, and what differs), `checkup` (all of it together).
"""
