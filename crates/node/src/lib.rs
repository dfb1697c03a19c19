//! A sandbox from an image: prepares a VMM, boots it, talks to its agent. Later the daemon's core.
