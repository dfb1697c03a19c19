"""A server that runs code in Jupyter kernels for clients of E2B's code interpreter.

`server` speaks HTTP, `contexts` keeps kernels and lets one execution after the other into each, `kernel` is one process of Jupyter's,
`languages` says how kernels of a language are started and given an environment, `events` turns what kernels say into the lines that clients
read, and `in_kernel` is what runs inside of a Python kernel. Who may ask is decided before a request gets here, by the gateway.
"""
