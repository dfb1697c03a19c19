//! The lists of steps behind `make run` and `make test`, in the order in which they are shown.
//!
//! Knows which steps exist and what each needs; how a step works is in the modules below.

mod apt;
mod bench_killed;
mod build;
mod case_sum;
mod cases;
mod checks;
mod cuda;
mod deb;
mod deny;
mod dkms;
mod driver;
mod e2b;
mod e2b_api;
mod guest;
mod host_ends;
mod lab_killed;
mod lab_site;
mod licences;
mod long;
mod module;
mod node_tests;
mod package;
mod sandbox;
mod tests;
mod ui;
mod unit;
mod vmfunc;

pub(crate) use build::cargo;
pub(crate) use cuda::cuda_client;
pub(crate) use driver::for_glibc;
pub(crate) use e2b_api::{print_figures, write_table};
pub(crate) use tests::{fuzzer, now};

use crate::clients;
use crate::cuda_programs as nvcc;
use crate::recipe::Recipe;
use crate::runner::{Plan, Step};
use crate::torch;
use e2b::interpreter;

/// Programs that a first run needs.
const RUN_PROGRAMS: &[&str] = &[
    "basalt",
    "basaltd",
    "basalt-gateway",
    "basalt-vmm",
    "basalt-agent",
    "basalt-lab",
    "basalt-lab-init",
];
/// Programs that tests need besides.
const TEST_PROGRAMS: &[&str] = &["basalt-lab-cases", "basalt-kernel-check"];
/// What measures, and needs the others.
const BENCH_PROGRAMS: &[&str] = &["basalt-bench"];

const KERNEL: Recipe = Recipe {
    name: "kernel",
    dir: "kernel",
};
const EMULATOR: Recipe = Recipe {
    name: "emulator",
    dir: "lab/emulator",
};
const LAB_HOST: Recipe = Recipe {
    name: "lab-host",
    dir: "lab/host",
};
const FAST_EMULATOR: Recipe = Recipe {
    name: "fast-emulator",
    dir: "lab/fast-emulator",
};
const NEWER_EMULATOR: Recipe = Recipe {
    name: "newer-emulator",
    dir: "lab/newer-emulator",
};
const NEWER_KERNEL: Recipe = Recipe {
    name: "newer-kernel",
    dir: "lab/newer-kernel",
};
const PYTHON: Recipe = Recipe {
    name: "image-python",
    dir: "images/python",
};
const REDIS: Recipe = Recipe {
    name: "image-redis",
    dir: "images/redis",
};
const NODE: Recipe = Recipe {
    name: "image-node",
    dir: "images/node",
};

const BASE: Recipe = Recipe {
    name: "image-base",
    dir: "images/base",
};

const LOAD: Recipe = Recipe {
    name: "image-load",
    dir: "images/load",
};

/// What `make run` does.
pub(crate) fn run() -> Vec<Step> {
    let mut steps = setup(RUN_PROGRAMS);
    steps.push(sandbox::import("import-python", PYTHON, "python").after(&["image-python", "binaries"]));
    steps.push(sandbox::lab().after(&["binaries", "assets", "emulator", "lab-host"]));
    steps.push(sandbox::first_sandbox().after(&["assets", "import-python", "lab"]));
    steps
}

/// What `cargo xtask package` does: only what the packages are made of.
pub(crate) fn package(version: Option<String>) -> Vec<Step> {
    vec![
        apt::packages(),
        build::musl_target().after(&["apt-packages"]),
        recipe(KERNEL, HINT_KERNEL).after(&["apt-packages"]),
        build::binaries(RUN_PROGRAMS).after(&["musl-target"]),
        build::accelerator().after(&["musl-target"]).follows(&["binaries"]),
        guest::assets().after(&["kernel", "binaries"]),
        package::package(version.clone()).after(&["assets", "accelerator"]),
        dkms::package(version),
    ]
}

/// What `cargo xtask bench-image` does: `basalt-bench`, and the image that its part `exits` has guests run. No test needs them.
pub(crate) fn bench_image() -> Vec<Step> {
    let programs: Vec<_> = RUN_PROGRAMS.iter().chain(BENCH_PROGRAMS).copied().collect();
    vec![
        apt::packages(),
        build::musl_target().after(&["apt-packages"]),
        build::binaries(&programs).after(&["musl-target"]),
        recipe(LOAD, HINT_IMAGE).after(&["apt-packages"]),
        sandbox::import("import-load", LOAD, "load").after(&["image-load", "binaries"]),
    ]
}

/// What `cargo xtask accel-clients` does: the programs, and then `last`.
pub(crate) fn accel_clients(last: Step) -> Vec<Step> {
    vec![
        apt::packages(),
        recipe(clients::RECIPE, HINT_CLIENTS).after(&["apt-packages"]),
        last.after(&["unpack-clients"]),
    ]
}

/// What `cargo xtask cuda-programs` does.
pub(crate) fn cuda_programs() -> Vec<Step> {
    vec![
        apt::packages(),
        build::musl_target().after(&["apt-packages"]),
        build::accelerator().after(&["musl-target"]),
        recipe(nvcc::RECIPE, HINT_NVCC).after(&["apt-packages"]),
        nvcc::step().after(&["accelerator", "cuda-clients"]),
    ]
}

/// What `cargo xtask vmfunc` does.
pub(crate) fn vmfunc() -> Vec<Step> {
    let mut steps = vec![build::components(), apt::packages()];
    steps.extend(in_bochs());
    steps
}

/// Intel's VMFUNC in an emulated Intel processor, and what that needs.
fn in_bochs() -> Vec<Step> {
    vec![
        vmfunc::bare_target(),
        recipe(vmfunc::BOCHS, HINT_LAB).after(&["apt-packages"]),
        vmfunc::vmfunc().after(&["rust-components", "bare-target", "bochs"]),
    ]
}

/// What `cargo xtask torch` does: the wheel, and then `last`.
pub(crate) fn torch(last: Step) -> Vec<Step> {
    vec![
        apt::packages(),
        recipe(torch::RECIPE, HINT_CLIENTS).after(&["apt-packages"]),
        last.after(&["torch-client"]),
    ]
}

/// What `make check` does: what needs no virtual machine, with the packages that building the tests needs.
pub(crate) fn check() -> Vec<Step> {
    vec![
        build::components(),
        checks::fmt().after(&["rust-components"]),
        checks::tidy().after(&["rust-components"]),
        apt::packages(),
        checks::clippy().after(&["rust-components"]),
        deny::deny(),
        // Not beside clippy: both wait for the same build directory's lock.
        unit::build().after(&["apt-packages"]).follows(&["clippy"]),
        unit::unit().after(&["build-tests"]),
        unit::programs().after(&["build-tests"]),
    ]
}

/// What `cargo xtask long` does, one after another: each takes minutes, all of them some hours.
pub(crate) fn long() -> Vec<Step> {
    let programs = RUN_PROGRAMS.iter().chain(TEST_PROGRAMS).chain(BENCH_PROGRAMS);
    let mut steps = setup(&programs.copied().collect::<Vec<_>>());
    steps.push(sandbox::import("import-python", PYTHON, "python").after(&["image-python", "binaries"]));
    steps.push(recipe(LOAD, HINT_IMAGE).after(&["apt-packages"]));
    steps.push(sandbox::import("import-load", LOAD, "load").after(&["image-load", "binaries"]));
    steps.push(in_lab(NEWER_KERNEL));
    steps.push(module::module().check().after(&["lab-host", "newer-kernel"]));
    steps.push(sandbox::lab().after(&["binaries", "assets", "emulator", "lab-host"]));
    steps.push(
        sandbox::first_sandbox()
            .check()
            .after(&["assets", "lab", "import-python"]),
    );
    steps.push(unit::build().after(&["apt-packages"]).follows(&["binaries"]));
    let tests = [long::fuzz(), long::power_failures()].map(|part| part.after(&["build-tests"]));
    let cases = long::cases().map(|part| part.after(&["first-sandbox", "module"]));
    let mut last = "first-sandbox";
    for part in tests.into_iter().chain(cases) {
        let name = part.name;
        steps.push(part.follows(&[last]));
        last = name;
    }
    steps.push(recipe(e2b_api::SCHEMATHESIS, HINT_SDKS).after(&["apt-packages"]));
    let made_up = e2b_api::made_up_by_night().after(&["build-tests", "schemathesis-client"]);
    steps.push(made_up.follows(&[last]));
    last = "long-schemathesis";
    let killed = bench_killed::bench_killed().after(&["first-sandbox", "module", "import-load"]);
    steps.push(killed.follows(&[last]));
    steps.extend(
        [(e2b::CLIENTS, HINT_SDKS), (interpreter::IMAGE, HINT_IMAGE)]
            .map(|(one, hint)| recipe(one, hint).after(&["apt-packages"])),
    );
    let image = interpreter::IMAGE;
    steps.push(sandbox::import("import-code-interpreter", image, interpreter::TAG).after(&[image.name, "binaries"]));
    let ready = ["first-sandbox", "e2b-clients", "import-code-interpreter"];
    steps.push(interpreter::code_interpreter().after(&ready).follows(&["bench-killed"]));
    // Its emulator loses its host, or a program there, too often for a run that has to pass (docs/lab.md).
    steps.push(in_lab(NEWER_EMULATOR));
    let newer = ["first-sandbox", "newer-kernel", "newer-emulator"];
    steps.push(cases::newer_cases().after(&newer).follows(&["code-interpreter"]));
    steps.push(recipe(torch::RECIPE, HINT_CLIENTS).after(&["apt-packages"]));
    steps.push(
        torch::step(torch::TorchArgs::default())
            .check()
            .after(&["torch-client"])
            .follows(&["newer-cases"]),
    );
    steps.push(in_lab(FAST_EMULATOR));
    steps.push(package::packages_for_tests().after(&["assets"]));
    steps.push(recipe(nvcc::RECIPE, HINT_NVCC).after(&["apt-packages"]));
    let fast = ["first-sandbox", "fast-emulator", "module", "package", "cuda-clients"];
    steps.push(cases::fast_cases().after(&fast).follows(&["torch"]));
    steps
}

/// What `make test` does.
pub(crate) fn test() -> Vec<Step> {
    let mut steps = vec![
        build::components(),
        checks::fmt().after(&["rust-components"]),
        checks::tidy().after(&["rust-components"]),
    ];
    let programs: Vec<_> = RUN_PROGRAMS.iter().chain(TEST_PROGRAMS).copied().collect();
    steps.extend(setup(&programs));
    // Beside the kernel, the programs and the images, which leave processors idle again and again. Tests first, which wait a lot when they run,
    // and that is to be beside the cases; lints take the build directory's lock, which tests that begin want.
    let built = unit::build().after(&["apt-packages"]).in_background();
    let clippy = checks::clippy().after(&["rust-components"]).follows(&["unit-tests"]);
    steps.extend([built, clippy.in_background(), deny::deny().in_background()]);
    let images = [REDIS, NODE, BASE].map(|image| recipe(image, HINT_IMAGE));
    steps.extend(images.map(|step| step.after(&["apt-packages"])));
    steps.push(recipe(e2b::CLIENTS, HINT_SDKS).after(&["apt-packages"]));
    steps.push(recipe(nvcc::RECIPE, HINT_NVCC).after(&["apt-packages"]));
    // Nobody waits for these before the lab is up.
    let clients = [e2b_api::SCHEMATHESIS, ui::CLIENT].map(|client| recipe(client, HINT_SDKS));
    steps.extend(clients.map(|step| step.after(&["apt-packages"]).in_background()));
    steps.push(apt::browser().after(&["apt-packages"]).in_background());
    for (name, recipe, tag) in [
        ("import-python", PYTHON, "python"),
        ("import-redis", REDIS, "redis"),
        ("import-node", NODE, "node"),
        ("import-base", BASE, "base"),
    ] {
        steps.push(sandbox::import(name, recipe, tag).after(&[recipe.name, "binaries"]));
    }
    // `vmfunc` waits for the build directory's lock, as the build of tests does.
    steps.extend(in_bochs().into_iter().map(|step| match step.name {
        "vmfunc" => step.follows(&["clippy"]).in_background(),
        _ => step,
    }));
    steps.push(in_lab(NEWER_KERNEL));
    steps.push(module::module().check().after(&["lab-host", "newer-kernel"]));
    steps.push(sandbox::lab().after(&["binaries", "assets", "emulator", "lab-host"]));
    let ready = ["assets", "lab", "import-python", "import-redis", "import-node"];
    steps.push(sandbox::first_sandbox().check().after(&ready));
    steps.push(package::packages_for_tests().after(&["assets"]));
    steps.push(dkms::package_for_tests().after(&["apt-packages"]));
    steps.push(sandbox::other_images().check().after(&["first-sandbox"]));
    // Not beside what takes all processors: cases have time limits. The emulator takes one of two, and the other is for the tests,
    // at the lowest priority, and for their build where that has not ended yet.
    let before = ["other-images", "module-package"];
    steps.push(
        cases::cases()
            .after(&["first-sandbox", "package", "module", "cuda-clients"])
            .follows(&before),
    );
    let tested = [
        "unit-tests",
        "program-tests",
        "fuzz",
        "accel-clients",
        "cuda-programs",
        "schemathesis",
        "ui",
    ];
    for step in [unit::unit(), unit::programs(), tests::fuzz()] {
        steps.push(step.after(&["build-tests"]).in_background());
    }
    let clients = clients::quick().after(&["build-tests", "unpack-clients"]);
    steps.push(
        recipe(clients::RECIPE, HINT_CLIENTS)
            .after(&["apt-packages"])
            .in_background(),
    );
    let programs = nvcc::step().after(&["accelerator", "cuda-clients"]);
    steps.push(programs.follows(&["accel-clients"]).in_background());
    steps.push(e2b_api::api().after(&["binaries", "e2b-clients"]));
    let made_up = e2b_api::made_up().after(&["build-tests", "schemathesis-client"]);
    steps.push(made_up.follows(&["program-tests"]).in_background());
    // Not beside the build of tests: it has the server and the library compiled as that does.
    steps.push(clients.follows(&["program-tests"]).in_background());
    let page = ui::ui().after(&["build-tests", "ui-client", "browser"]);
    steps.push(page.follows(&["program-tests"]).in_background());
    // Beside what is left for the lab, but for the audit, which runs cases.
    steps.push(checks::docs().after(&["first-sandbox"]).follows(&["cases"]));
    steps.push(lab_site::lab_site().after(&["first-sandbox"]).follows(&["docs"]));
    let audit = tests::audit().after(&["first-sandbox"]);
    steps.push(audit.follows(&["lab-site"]).follows(&tested));
    // In labs of their own, one after another, beside the cases: no processor is left for that before.
    let sdks = e2b::e2b().after(&["first-sandbox", "e2b-clients", "import-base"]);
    steps.push(sdks.follows(&before).follows(&["package"]));
    let killed = lab_killed::lab_killed().check().after(&["first-sandbox"]);
    steps.push(killed.follows(&["e2b"]));
    let ends = host_ends::host_ends().check();
    steps.push(ends.after(&["first-sandbox", "module"]).follows(&["lab-killed"]));
    steps
}

const HINT_KERNEL: &str = "the guest kernel is built by kernel/recipe.sh from Debian's linux-source";
const HINT_LAB: &str = "the lab's parts come from Debian packages; see whether `apt-get update` works";
const HINT_CLIENTS: &str =
    "the clients come from Debian packages and by pip; see whether `apt-get update` works, and PyPI can be reached";
const HINT_NVCC: &str = "nvcc comes by pip; see whether PyPI can be reached";
const HINT_SDKS: &str = "the SDKs come by pip and npm; see whether PyPI and npm can be reached";
const HINT_IMAGE: &str = "images are made of Debian packages; see whether `apt-get update` works";

/// From a bare machine to programs, assets and the python image. The slowest come first: what needs a processor runs
/// beside what waits for the network.
fn setup(programs: &[&'static str]) -> Vec<Step> {
    vec![
        apt::packages(),
        build::musl_target().after(&["apt-packages"]),
        recipe(KERNEL, HINT_KERNEL).after(&["apt-packages"]),
        build::binaries(programs).after(&["musl-target"]),
        build::accelerator().after(&["musl-target"]).follows(&["binaries"]),
        in_lab(LAB_HOST),
        recipe(PYTHON, HINT_IMAGE).after(&["apt-packages"]),
        in_lab(EMULATOR),
        guest::assets().after(&["kernel", "binaries", "accelerator"]),
    ]
}

fn recipe(recipe: Recipe, hint: &'static str) -> Step {
    Step::new(recipe.name, move |context, task| recipe.make(context, task))
        .plan(move |context| {
            Ok(if recipe.is_made(context)? {
                Plan::Done
            } else {
                Plan::Run
            })
        })
        .hint(hint)
}

/// A recipe of which a machine with hardware virtualization has no need.
fn in_lab(recipe: Recipe) -> Step {
    Step::new(recipe.name, move |context, task| recipe.make(context, task))
        .plan(move |context| {
            Ok(match (context.kvm, recipe.is_made(context)?) {
                (true, _) => Plan::NotNeeded("this machine has KVM".into()),
                (false, true) => Plan::Done,
                (false, false) => Plan::Run,
            })
        })
        .after(&["apt-packages"])
        .hint(HINT_LAB)
}

#[cfg(test)]
mod self_tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_prerequisite_exists_and_names_are_unique() {
        let clients = accel_clients(clients::quick());
        for steps in [
            run(),
            check(),
            test(),
            long(),
            package(None),
            bench_image(),
            vmfunc(),
            clients,
            cuda_programs(),
        ] {
            let names: BTreeSet<_> = steps.iter().map(|step| step.name).collect();
            assert_eq!(names.len(), steps.len());
            for step in &steps {
                for needed in step.after.iter().chain(&step.follows) {
                    assert!(names.contains(needed), "{} needs {needed}", step.name);
                }
            }
        }
    }
}
