"""The command line: options in, tables and exit codes out. Everything heavy is imported by the command that needs it.

* `verbs/`: a module a group of verbs: their options, their texts
* `app`: the program, `--version`, and `main`: every outcome as an exit code
* `commands`: the commands by name, built when asked for, and their `--help`; words of former releases and of others
* `manual`: summaries, examples and exit codes of `--help`
* `options`: an option as a row, and how its value is read
* `table`: the options that verbs share, and how options become a command
* `writing`: runs a verb that writes, for one iteration or all, and prints its report
* `render`: tables for people, in as many columns as a terminal has; JSON for programs
* `findings`: reports of checks: text, JSON, GitHub, Markdown, JUnit
* `reports`: the report of a conversion
* `progress`: the bar on stderr
"""
