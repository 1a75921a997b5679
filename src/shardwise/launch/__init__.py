"""Starting ranks and being one: nothing here knows what the ranks compute.

`environment` reads who this process is, `local` starts ranks on this machine and watches them, `rank` is what a rank
does about signals and its launcher, `group` joins and leaves the process group, `failure` says why a rank died. Only
`group` imports torch.
"""
