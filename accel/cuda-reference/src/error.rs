//! Why a call fails: the runtime's code, whether it is told from then on, and what a log says. Knows no call.

use accel_cuda_null::Failure;
use accel_ptx::fatbin::FatbinError;
use accel_ptx::{LaunchError, OutOfRange, Refused};
use thiserror::Error;

/// Why a call fails.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// An object, an address or a size is not what it has to be.
    #[error("{}", said(*.0))]
    Failure(Failure),
    /// Arguments that mean nothing together.
    #[error("{0}")]
    Invalid(&'static str),
    /// Something that the back end does not compute.
    #[error("{0} is not computed; docs/accel-cuda-reference.md lists what is")]
    NotComputed(&'static str),
    /// One of before its state was saved; the runtime's code.
    #[error("error {0} of before a snapshot")]
    Before(i32),
    /// The client is gone.
    #[error("the client is gone, and its call was not carried out to the end")]
    Stopped,
    /// The module has no such variable.
    #[error("its module has no variable '{0}', or one of another size")]
    NoVariable(String),
    /// The module's bytes have not come, or not all of them.
    #[error("the module's code has not come; {0} bytes of {1} are there")]
    NoCode(u64, u64),
    /// There is no PTX in a fat binary.
    #[error(transparent)]
    Fatbin(#[from] FatbinError),
    /// PTX that is not accepted.
    #[error(transparent)]
    Ptx(#[from] Refused),
    /// A launch that failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

fn said(failure: Failure) -> &'static str {
    match failure {
        Failure::InvalidValue => "an address or a size that cannot be; see what the call was given",
        Failure::OutOfMemory => {
            "there is not enough memory, or there are too many objects; free some, or raise --memory"
        }
        Failure::InvalidHandle => "no such object; make it before it is used",
        Failure::IllegalAddress => "an address that is in no allocation, or not all of it; see what the call was given",
    }
}

impl Error {
    /// The runtime's code (CUDA Runtime API, `cudaError_t`).
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            Self::Failure(failure) => failure.code(),
            Self::Invalid(_) => 1,
            Self::NotComputed(_) => 801,
            Self::Before(code) => *code,
            // cudaErrorLaunchTimeout, which nobody hears of.
            Self::Stopped => 702,
            // cudaErrorInvalidSymbol
            Self::NoVariable(_) => 13,
            // cudaErrorInvalidKernelImage, cudaErrorNoKernelImageForDevice, cudaErrorInvalidPtx
            Self::NoCode(..) => 200,
            Self::Fatbin(FatbinError::NoPtx) => 209,
            Self::Fatbin(_) => 200,
            Self::Ptx(_) => 218,
            Self::Launch(error) => error.cuda().1.cast_signed(),
        }
    }

    /// Whether every later call fails by it, too. What a kernel did wrong is (CUDA Runtime API, `cudaError_t`: errors after which the
    /// process must be ended); what was asked for wrongly is told once.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        matches!(self.code(), 700 | 702 | 710 | 714..=719)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl From<OutOfRange> for Error {
    fn from(_: OutOfRange) -> Self {
        Self::Failure(Failure::IllegalAddress)
    }
}

/// A room that the host does not have.
impl From<std::collections::TryReserveError> for Error {
    fn from(_: std::collections::TryReserveError) -> Self {
        Self::Failure(Failure::OutOfMemory)
    }
}
