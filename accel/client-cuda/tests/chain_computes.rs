//! As the test `chain`, with a device that computes: a program's fat binary and its kernels' arguments go through functions of C, and what
//! comes back is right.

mod support;

use std::time::{Duration, Instant};

use accel_server::{Backend, ServerError};
use support::chain::{Chain, ended};

#[test]
fn kernels_of_a_program_compute_behind_two_servers() {
    let chain = Chain::new("tests/chain/saxpy.c", (Backend::reference(), 256 << 20), 64 << 20);
    let binary = concat!(env!("CARGO_MANIFEST_DIR"), "/../ptx/tests/fatbin/none.bin");
    let said = chain.linked.program(binary, &[]);
    assert!(said.contains("4096 of 4096 are right"), "{said}");
    let stats = ended(&chain.first, 0);
    // One kernel that the module has not, and one of a module that was unloaded.
    let errors: Vec<_> = stats.errors.into_iter().collect();
    assert_eq!(errors, [(98, 1), (400, 1)]);
    // The modules' own memory stays until the first server ends: there is no call for a client that chooses addresses.
    assert!(chain.device.stats().memory.used <= 4096);

    // A kernel that writes where nothing is ends the context, and with it the server, when the next client comes.
    let said = chain.linked.run_with(&[binary, "nowhere"]);
    assert!(said.status.success(), "{said:?}");
    ended(&chain.first, 0);
    let said = chain.linked.run_with(&[binary]);
    assert_eq!(said.status.code(), Some(1), "there is no device any more");
    let begin = Instant::now();
    while !chain.served.is_finished() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the server goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = chain.served.join().unwrap().unwrap_err();
    assert!(matches!(error, ServerError::Lost(700)), "{error}");
    assert!(error.to_string().contains("start it again"), "{error}");
}
