//! Owned kernel objects and the small vocabulary everything above is written in: event fds, epoll, memfds, fd passing, workers, byte sizes.
