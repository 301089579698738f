"""A shell lets what it runs behind itself ignore Ctrl-C, and so would every process that a test sends one."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
