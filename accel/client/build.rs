//! How the library is linked: it stays in a process that has closed it, because a thread of its own may run, and the application may have addresses in the
//! memory that it mapped.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
