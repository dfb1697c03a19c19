//! Why a call fails, and what each library's code for that is.
//!
//! Knows no call.

/// Whose codes a call answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// `cudaError_t`.
    Cudart,
    /// `cublasStatus_t`.
    Cublas,
    /// `cudnnStatus_t`.
    Cudnn,
    /// `curandStatus_t`.
    Curand,
}

/// Why a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A number that means nothing, or one that is too large.
    InvalidValue,
    /// There is no memory left, of the device or of what a client may have.
    OutOfMemory,
    /// A name that no object of the client has.
    InvalidHandle,
    /// An address that is in no allocation of the client's.
    IllegalAddress,
    /// The library has no such function, or is not there.
    NotServed,
    /// What the library has answered.
    Library(i32),
}

impl Failure {
    /// The code.
    pub(crate) fn code(self, group: Group) -> i32 {
        // In the order of the values above: invalid value, out of memory, invalid handle, illegal address, not supported.
        let codes = match group {
            Group::Cudart => [1, 2, 400, 700, 801],
            Group::Cublas => [7, 3, 1, 13, 15],
            Group::Cudnn => [2000, 4000, 1001, 5000, 3000],
            Group::Curand => [104, 102, 101, 201, 999],
        };
        match self {
            Self::InvalidValue => codes[0],
            Self::OutOfMemory => codes[1],
            Self::InvalidHandle => codes[2],
            Self::IllegalAddress => codes[3],
            Self::NotServed => codes[4],
            Self::Library(code) => code,
        }
    }
}

/// The code of a group for a call of before of another one that failed.
pub(crate) fn of_another(group: Group) -> i32 {
    match group {
        // cudaErrorUnknown
        Group::Cudart => 999,
        _ => Failure::IllegalAddress.code(group),
    }
}

/// What a function of C has answered.
pub(crate) fn check(status: i32) -> Result<(), Failure> {
    match status {
        0 => Ok(()),
        code => Err(Failure::Library(code)),
    }
}

/// A number of a client's in the type that C has for it.
pub(crate) fn number<T, U: TryFrom<T>>(value: T) -> Result<U, Failure> {
    U::try_from(value).map_err(|_| Failure::InvalidValue)
}
