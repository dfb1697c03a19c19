//! Where each program is linked. The addresses are those of src/abi.rs.

use std::env;

fn main() {
    let dir = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    for (program, script, base) in [
        ("firmware", "firmware", "0xffff0000"),
        ("hypervisor", "hypervisor", "0x100000"),
        ("server_kernel", "guest", "0xffff9acccccccccc"),
        ("client_kernel", "guest", "0xffffffff80000ccc"),
        ("server", "guest", "0x18000001000"),
        ("client", "guest", "0x400000"),
    ] {
        for argument in [
            "--no-pie".to_owned(),
            "-zmax-page-size=4096".to_owned(),
            format!("--defsym=BASE={base}"),
            format!("-T{dir}/link/{script}.ld"),
        ] {
            println!("cargo:rustc-link-arg-bin={program}={argument}");
        }
    }
    println!("cargo:rerun-if-changed=link");
    println!("cargo:rerun-if-env-changed=VMFUNC_GUESTS");
}
