"""The command line: options in, tables and exit codes out. Everything heavy is imported by the command that needs it.

* `app`: the program, `--version`, and `main`: every outcome as an exit code
* `commands`: the commands by name, built when asked for
* `removed`: what former releases had, and what does it now
* `manual`: summaries, examples and exit codes of `--help`
* `help`: how `--help` is laid out
* `options`: what an option is: one row, from its spelling to its default
* `table`: the rows that several commands share
* `given_values`: values as people write them, and places that can be written to
* `signature`: rows to a command, and what was given to the library's options classes
* `job_sizes`: the training job of what was given
* `convert`: `convert`
* `long_names`: `convert` under NVIDIA's two names
* `group_map`: `build-param-group-map`
* `plan`: `plan`
* `huggingface`: `export-hf`, `import-hf`
* `inspect`: `inspect`, `print-torch-dcp-in-json`
* `edit`: `modify-state-dict`, `slice`, `print-tensor`
* `copy`: `copy`
* `average`: `average`
* `merge_adapter`: `merge-adapter`
* `strip`: `strip`
* `repair`: `repair`
* `ls`: `ls`
* `stats`: `stats`
* `verify`: `verify`, `preflight`
* `diff`: `diff`, `compare-two-checkpoint`
* `fold`: lines and tables in as many columns as a terminal has
* `render`: tables for people, JSON for programs
* `reports`: the report of a conversion
* `iterations`: `--iteration all` of what writes, and what became of each
* `findings`: reports of checks: text, JSON, GitHub, Markdown, JUnit
* `progress`: the bar on stderr
"""
