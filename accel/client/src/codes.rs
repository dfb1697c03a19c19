//! Error codes of OpenCL that this library gives by itself; others come from the server as numbers. Knows no call.

/// An error code of the API; never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

macro_rules! codes {
    ($($name:ident = $value:literal;)*) => {
        impl Code {
            $(pub(crate) const $name: Self = Self($value);)*
        }
    };
}

codes! {
    MEM_OBJECT_ALLOCATION_FAILURE = -4;
    OUT_OF_RESOURCES = -5;
    OUT_OF_HOST_MEMORY = -6;
    MEM_COPY_OVERLAP = -8;
    IMAGE_FORMAT_MISMATCH = -9;
    MAP_FAILURE = -12;
    DEVICE_NOT_FOUND = -1;
    DEVICE_NOT_AVAILABLE = -2;
    LINK_PROGRAM_FAILURE = -17;
    INVALID_VALUE = -30;
    INVALID_DEVICE_TYPE = -31;
    INVALID_PLATFORM = -32;
    INVALID_DEVICE = -33;
    INVALID_CONTEXT = -34;
    INVALID_HOST_PTR = -37;
    INVALID_MEM_OBJECT = -38;
    INVALID_IMAGE_FORMAT_DESCRIPTOR = -39;
    INVALID_PROGRAM = -44;
    INVALID_KERNEL = -48;
    INVALID_ARG_INDEX = -49;
    INVALID_ARG_VALUE = -50;
    INVALID_ARG_SIZE = -51;
    INVALID_KERNEL_ARGS = -52;
    INVALID_WORK_DIMENSION = -53;
    INVALID_EVENT_WAIT_LIST = -57;
    INVALID_EVENT = -58;
    INVALID_OPERATION = -59;
    INVALID_BUFFER_SIZE = -61;
    INVALID_PROPERTY = -64;
    INVALID_IMAGE_DESCRIPTOR = -65;
    PLATFORM_NOT_FOUND_KHR = -1001;
}

impl Code {
    /// What the API's calls return: nothing, or this.
    pub(crate) fn of(done: Result<(), Self>) -> i32 {
        done.err().map_or(0, |code| code.0)
    }

    /// A status that came from the server.
    pub(crate) fn check(status: i32) -> Result<(), Self> {
        match status {
            0 => Ok(()),
            code => Err(Self(code)),
        }
    }
}
