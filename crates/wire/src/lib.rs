//! Framed messages over byte streams, and packets with file descriptors over unix sockets; never looks into a message.
