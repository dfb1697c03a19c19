//! The contract between the agent inside a guest (or the lab host) and its client.
