"""Tables, texts and JSON.

* `render`: tables for people, JSON for programs
* `fold`: lines and tables in as many columns as a terminal has
* `findings`: reports of checks: text, JSON, GitHub, Markdown, JUnit
* `reports`: the report of a conversion
* `progress`: the bar on stderr
"""
