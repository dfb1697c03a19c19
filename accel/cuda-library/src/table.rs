//! Tables of functions of C by their names.
//!
//! Knows how a table is filled, and no function.
#![allow(
    unsafe_code,
    reason = "functions of a library are found by name and have the types that the specification gives them"
)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// What C has as a pointer: an object, a place for results, or a list.
pub(crate) type P = *mut c_void;

/// `dim3`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dim3 {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) z: u32,
}

/// Who finds a function's address by its name.
pub(crate) type Find<'f> = &'f dyn Fn(&CStr) -> Option<NonNull<c_void>>;

/// A table of functions, all of which return a code: a field for each, missing if the library has none, and a method of the same name that
/// gives it.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident($($type:ty),*);)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "the names are C's")]
        pub(crate) struct $table {
            $($name: Option<unsafe extern "C" fn($($type),*) -> i32>,)*
        }

        #[allow(non_snake_case, reason = "the names are C's")]
        impl $table {
            /// All of them, from whoever finds them by name; and the names of those that were not found.
            ///
            /// # Safety
            ///
            /// What is found by a name is the function that the specification calls so, and stays for as long as the process.
            #[allow(unsafe_code, reason = "an address of a library is a function's")]
            pub(crate) unsafe fn find(find: crate::table::Find<'_>) -> (Self, Vec<&'static str>) {
                let mut missing = Vec::new();
                $(
                    let $name = find(const { crate::table::c_name(concat!(stringify!($name), "\0")) }).map(|address| {
                        // SAFETY: 1. both are an address of a function; 2. the caller vouches for it being this one.
                        unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<std::ffi::c_void>,
                                unsafe extern "C" fn($($type),*) -> i32,
                            >(address)
                        }
                    });
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                (Self { $($name),* }, missing)
            }

            $(
                /// The function of that name.
                pub(crate) fn $name(
                    &self,
                ) -> Result<unsafe extern "C" fn($($type),*) -> i32, crate::failure::Failure> {
                    self.$name.ok_or(crate::failure::Failure::NotServed)
                }
            )*
        }
    };
}

/// One line for each call: its name, the library whose codes it answers with, and the function that carries it out.
macro_rules! calls {
    ($($name:ident => $group:ident $function:path;)*) => {
        /// Carries a call out; with the library whose codes it answers with.
        pub(crate) fn carry_out(
            cx: &mut crate::state::Context<'_>,
            call: &accel_proto::cuda::AnyCall<'_>,
        ) -> (crate::failure::Group, Result<(), crate::failure::Failure>) {
            match call {
                $(accel_proto::cuda::AnyCall::$name(call) => (crate::failure::Group::$group, $function(cx, call)),)*
            }
        }
    };
}

pub(crate) use calls;
pub(crate) use functions;

/// A name as C has it; its zero is there.
pub(crate) const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}
