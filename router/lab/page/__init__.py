"""One HTML page about runs of a trace: `page` writes it, `runs` says what it shows, `charts` draws."""
