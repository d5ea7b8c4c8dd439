"""The command line: options in, tables and exit codes out. Everything heavy is imported by the command that needs it.

* `app`: the program, and `main`: every outcome as an exit code
* `commands`: the commands by name, built when asked for
* `manual`: summaries, examples and exit codes of `--help`
* `man_pages`: `man`
* `completion`: what Tab offers of a checkpoint
* `help`: how `--help` is laid out
* `options`: options that several commands share
* `job_sizes`: those that describe a training job
* `convert`: `convert`, its long names, `build-param-group-map`
* `table`: options of the commands that convert, stated once
* `plan`: `plan`
* `huggingface`: `export-hf`, `import-hf`
* `inspect`: `inspect`, `print-torch-dcp-in-json`
* `edit`: `modify-state-dict`, `slice`, `print-tensor`
* `average`: `average`
* `strip`: `strip`
* `verify`: `verify`, `diff`, `preflight`
* `environment`: `env`, `--version`
* `render`: tables for people, JSON for programs
* `reports`: the report of a conversion
* `findings`: reports of checks: text, JSON, GitHub, Markdown, JUnit
* `progress`: the bar on stderr
"""
