//! Descriptors that a server for a guest inherits, as its flags name them. Does not know what they are.

use std::os::fd::RawFd;

/// All of them, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestFds {
    pub(crate) vsock: RawFd,
    pub(crate) window: RawFd,
    pub(crate) driver: RawFd,
    pub(crate) musl_driver: RawFd,
    pub(crate) ready: RawFd,
    /// CUDA's libraries.
    pub(crate) cuda_driver: Option<RawFd>,
    pub(crate) save: Option<RawFd>,
    pub(crate) restore: Option<RawFd>,
    /// The directory of an arbiter's socket.
    pub(crate) arbiter: Option<RawFd>,
    /// Where statistics are told.
    pub(crate) control: Option<RawFd>,
}

/// Flags, without the dashes: first those that are needed.
const NAMES: [&str; 10] = [
    "vsock-fd",
    "window-fd",
    "driver-fd",
    "musl-driver-fd",
    "ready-fd",
    "cuda-driver-fd",
    "save-fd",
    "restore-fd",
    "arbiter-fd",
    "control-fd",
];

/// The same as they are said, one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fds([Option<RawFd>; NAMES.len()]);

/// Which of them a flag is.
pub(super) fn place(flag: &str) -> Option<usize> {
    NAMES.iter().position(|name| *name == flag)
}

impl Fds {
    /// One is said.
    pub(super) fn set(&mut self, place: usize, number: RawFd) {
        if let Some(fd) = self.0.get_mut(place) {
            *fd = Some(number);
        }
    }

    /// All of them, if those are there that are needed.
    pub(super) fn whole(self) -> Option<GuestFds> {
        let [
            vsock,
            window,
            driver,
            musl_driver,
            ready,
            cuda_driver,
            save,
            restore,
            arbiter,
            control,
        ] = self.0;
        Some(GuestFds {
            vsock: vsock?,
            window: window?,
            driver: driver?,
            musl_driver: musl_driver?,
            ready: ready?,
            cuda_driver,
            save,
            restore,
            arbiter,
            control,
        })
    }
}
