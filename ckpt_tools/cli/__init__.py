"""The command line: options in, tables and exit codes out. Everything heavy is imported by the command that needs it.

* `verbs/`: a module a verb, or a few: its options, its text
* `options/`: options as rows, and what was given
* `render/`: tables, texts and JSON
* `app`: the program, `--version`, and `main`: every outcome as an exit code
* `commands`: the commands by name, built when asked for
* `removed`: what former releases had, and what does it now
* `manual`: summaries, examples and exit codes of `--help`
* `help`: how `--help` is laid out
* `iterations`: `--iteration all` of what writes, and what became of each
"""
