//! CUDA by its real libraries, which are loaded by dlopen(3): a client's calls as functions of C, with its objects, its memory within a
//! quota, and what it leaves behind.
//!
//! ```text
//!   AnyCall ──▶ generated (most) or hand (memory, modules, launches) ──▶ function of libcudart, libcublas, libcudnn, ... ──▶ AnyReply
//!                 └── names to objects, addresses to allocations, descriptors made again ──┘
//! ```
//!
//! What a client says is an allegation: a name is looked up among its own objects of that type, an address among its own allocations, and
//! nothing of it is a pointer of this process. A kernel that was launched reads and writes what it likes on the device, so that one process
//! serves one tenant. Knows no ring and no window.

mod bytes;
mod copies;
mod descriptor;
mod failure;
mod generated;
mod hand;
mod load;
mod memory;
mod state;
mod table;

pub use load::{Libraries, LibraryError};
pub use state::{Arena, State};
