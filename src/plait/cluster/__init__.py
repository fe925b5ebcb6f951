"""Workers on hosts: a list of hosts and a function's name in, running processes out.

A supervisor reaches each host through a shell and starts one agent there; the agent is torch's elastic
agent, which starts and watches the workers. No models here.
"""
