"""The launch package starts ranks and says what a rank must do to be one: nothing here knows what the ranks compute.

`environment` reads which rank this process is, `local` starts ranks on this machine and watches them, `signals` is what
a rank does about signals and its launcher, `process_group` joins and leaves the process group, `exit_report` says why a
rank died, `host` says which cores and memory there are. Only `process_group` imports torch at the start.
"""
