//! The cases.

use std::io::{Read, Write};
use std::time::Instant;

use rustix::process::Signal;

use crate::world::{World, is_alive, text, wait_for};
use crate::{
    admission, builds, checksums, copies, corruption, daemons, devices, full, images, limited, observed, outdated,
    power, private, snapshots, templates, tenants, transfer, transfer_registry, transfer_templates,
};

/// Each case with its name; some modules have lists of their own.
pub(crate) fn all() -> Vec<(&'static str, fn())> {
    [
        ALL,
        templates::CASES,
        builds::CASES,
        admission::CASES,
        devices::CASES,
        outdated::CASES,
        checksums::CASES,
        full::CASES,
        transfer_templates::CASES,
        private::CASES,
        corruption::CASES,
        power::CASES,
        tenants::CASES,
    ]
    .concat()
}

/// Those of the other modules.
const ALL: &[(&str, fn())] = &[
    (
        "without_the_device_the_error_names_it",
        without_the_device_the_error_names_it,
    ),
    ("what_is_missing_is_named", what_is_missing_is_named),
    (
        "output_and_exit_code_are_the_commands",
        output_and_exit_code_are_the_commands,
    ),
    (
        "a_command_that_cannot_run_is_127_or_126",
        a_command_that_cannot_run_is_127_or_126,
    ),
    (
        "the_images_own_command_environment_and_directory",
        the_images_own_command_environment_and_directory,
    ),
    ("flags_win_over_the_image", flags_win_over_the_image),
    (
        "streams_are_separate_and_binary_clean",
        streams_are_separate_and_binary_clean,
    ),
    ("no_input_where_none_is_wanted", no_input_where_none_is_wanted),
    ("signals_reach_the_command", signals_reach_the_command),
    ("time_limits_end_the_command", time_limits_end_the_command),
    (
        "a_reader_that_leaves_ends_the_writer",
        a_reader_that_leaves_ends_the_writer,
    ),
    (
        "a_terminal_has_size_keys_and_interrupt",
        a_terminal_has_size_keys_and_interrupt,
    ),
    (
        "a_killed_vmm_is_one_sentence_and_leaves_nothing",
        a_killed_vmm_is_one_sentence_and_leaves_nothing,
    ),
    (
        "a_killed_basalt_takes_its_vmm_with_it",
        a_killed_basalt_takes_its_vmm_with_it,
    ),
    ("a_signal_while_booting_ends_it", a_signal_while_booting_ends_it),
    ("a_kernel_panic_is_shown", a_kernel_panic_is_shown),
    ("a_refused_vm_is_explained", a_refused_vm_is_explained),
    (
        "more_memory_than_the_host_has_is_refused",
        more_memory_than_the_host_has_is_refused,
    ),
    (
        "a_detached_one_has_logs_commands_and_an_end",
        daemons::a_detached_one_has_logs_commands_and_an_end,
    ),
    (
        "the_log_of_one_that_floods_has_an_end",
        daemons::the_log_of_one_that_floods_has_an_end,
    ),
    (
        "a_log_is_followed_until_its_sandbox_ends",
        daemons::a_log_is_followed_until_its_sandbox_ends,
    ),
    (
        "a_vmm_that_is_busy_holds_up_no_statistics",
        daemons::a_vmm_that_is_busy_holds_up_no_statistics,
    ),
    (
        "sockets_that_somebody_deletes_are_made_again",
        daemons::sockets_that_somebody_deletes_are_made_again,
    ),
    (
        "a_killed_daemon_is_followed_by_one_that_knows_everything",
        daemons::a_killed_daemon_is_followed_by_one_that_knows_everything,
    ),
    (
        "a_daemon_that_ends_just_now_is_followed_by_another",
        daemons::a_daemon_that_ends_just_now_is_followed_by_another,
    ),
    (
        "a_hundred_come_and_go_four_at_a_time",
        daemons::a_hundred_come_and_go_four_at_a_time,
    ),
    (
        "a_lost_database_is_made_again_from_what_runs",
        daemons::a_lost_database_is_made_again_from_what_runs,
    ),
    (
        "only_one_daemon_has_a_state_directory",
        daemons::only_one_daemon_has_a_state_directory,
    ),
    (
        "a_new_program_takes_over_from_the_old_daemon",
        daemons::a_new_program_takes_over_from_the_old_daemon,
    ),
    (
        "all_are_ended_at_once_and_each_in_order",
        daemons::all_are_ended_at_once_and_each_in_order,
    ),
    (
        "a_sandbox_is_kept_and_goes_on",
        snapshots::a_sandbox_is_kept_and_goes_on,
    ),
    (
        "what_cannot_be_kept_is_refused_in_a_sentence",
        snapshots::what_cannot_be_kept_is_refused_in_a_sentence,
    ),
    (
        "a_snapshot_that_fails_leaves_a_sandbox_that_runs",
        snapshots::a_snapshot_that_fails_leaves_a_sandbox_that_runs,
    ),
    (
        "clones_go_on_with_names_of_their_own",
        snapshots::clones_go_on_with_names_of_their_own,
    ),
    (
        "memory_comes_as_it_is_asked_for",
        snapshots::memory_comes_as_it_is_asked_for,
    ),
    ("a_sandbox_is_put_back", snapshots::a_sandbox_is_put_back),
    (
        "a_rollback_that_fails_costs_as_little_as_it_can",
        snapshots::a_rollback_that_fails_costs_as_little_as_it_can,
    ),
    (
        "a_daemon_that_is_killed_on_the_way_leaves_a_sandbox_that_runs",
        snapshots::a_daemon_that_is_killed_on_the_way_leaves_a_sandbox_that_runs,
    ),
    (
        "a_saved_snapshot_is_all_that_another_machine_needs",
        transfer::a_saved_snapshot_is_all_that_another_machine_needs,
    ),
    (
        "what_is_no_whole_snapshot_leaves_nothing",
        transfer::what_is_no_whole_snapshot_leaves_nothing,
    ),
    (
        "an_image_can_be_left_out_and_come_later",
        transfer::an_image_can_be_left_out_and_come_later,
    ),
    (
        "whoever_dies_while_loading_leaves_nothing",
        transfer::whoever_dies_while_loading_leaves_nothing,
    ),
    ("a_full_disk_leaves_nothing", transfer::a_full_disk_leaves_nothing),
    (
        "a_stranger_names_neither_files_nor_sizes",
        transfer::a_stranger_names_neither_files_nor_sizes,
    ),
    (
        "a_snapshot_goes_by_a_registry",
        transfer_registry::a_snapshot_goes_by_a_registry,
    ),
    (
        "what_a_registry_has_instead_leaves_nothing",
        transfer_registry::what_a_registry_has_instead_leaves_nothing,
    ),
    (
        "an_image_of_a_sandbox_is_removed_only_by_force",
        images::an_image_of_a_sandbox_is_removed_only_by_force,
    ),
    (
        "what_is_taken_adds_up_to_what_du_says",
        images::what_is_taken_adds_up_to_what_du_says,
    ),
    ("files_and_trees_go_both_ways", copies::files_and_trees_go_both_ways),
    (
        "large_files_keep_their_holes_and_every_byte",
        copies::large_files_keep_their_holes_and_every_byte,
    ),
    (
        "archives_go_through_standard_streams",
        copies::archives_go_through_standard_streams,
    ),
    (
        "what_cannot_be_copied_is_explained",
        copies::what_cannot_be_copied_is_explained,
    ),
    (
        "an_interrupted_copy_leaves_whole_files_only",
        copies::an_interrupted_copy_leaves_whole_files_only,
    ),
    (
        "an_interrupted_copy_out_leaves_nothing_half",
        copies::an_interrupted_copy_out_leaves_nothing_half,
    ),
    (
        "limits_are_kept_shown_and_refused_where_they_are_nonsense",
        limited::limits_are_kept_shown_and_refused_where_they_are_nonsense,
    ),
    (
        "a_limit_that_the_host_cannot_keep_is_refused_by_its_name",
        limited::a_limit_that_the_host_cannot_keep_is_refused_by_its_name,
    ),
    (
        "a_trace_accounts_for_every_millisecond",
        observed::a_trace_accounts_for_every_millisecond,
    ),
    (
        "metrics_are_what_prometheus_reads",
        observed::metrics_are_what_prometheus_reads,
    ),
    (
        "scrapers_that_ask_nothing_hold_nobody",
        observed::scrapers_that_ask_nothing_hold_nobody,
    ),
    (
        "a_collector_gets_one_trace_of_all_programs",
        observed::a_collector_gets_one_trace_of_all_programs,
    ),
];

fn without_the_device_the_error_names_it() {
    let world = World::new("");
    let mut command = world.command(&["run", "tiny", "--", "true"]);
    let output = command.env("BASALT_KVM", "/nonexistent/kvm").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("/nonexistent/kvm cannot be opened") && stderr.contains("basalt doctor"),
        "{stderr}"
    );
}

fn what_is_missing_is_named() {
    let world = World::new("");
    std::fs::remove_file(world.path("basalt-assets/vmlinux")).unwrap();
    let output = world.run(&["tiny", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("vmlinux cannot be opened") && stderr.contains("make run"),
        "{stderr}"
    );
    let output = world.run(&["--entrypoint", "", "tiny"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(
        text(&output.stderr).contains("write one after the image"),
        "{}",
        text(&output.stderr)
    );
    let output = world.run(&["-p", "80", "tiny"]);
    assert!(
        text(&output.stderr).contains("is no port mapping"),
        "{}",
        text(&output.stderr)
    );
    let output = world.run(&["-p", "8080:80", "tiny"]);
    assert!(
        text(&output.stderr).contains("--network none"),
        "{}",
        text(&output.stderr)
    );
    let output = world.run(&["no-such-image"]);
    assert!(
        text(&output.stderr).contains("no-such-image"),
        "{}",
        text(&output.stderr)
    );
    assert!(
        world.verb(&["ps", "-aq"]).stdout.is_empty(),
        "nothing is left of what was refused"
    );
}

fn output_and_exit_code_are_the_commands() {
    let world = World::new("");
    let output = world.run(&["tiny", "--", "sh", "-c", "echo $((6*7)); echo no >&2; exit 3"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert_eq!(
        (text(&output.stdout).as_str(), text(&output.stderr).as_str()),
        ("42\n", "no\n")
    );
    assert_eq!(
        world.run(&["tiny", "--", "sh", "-c", "kill -9 $$"]).status.code(),
        Some(137)
    );
}

fn a_command_that_cannot_run_is_127_or_126() {
    let world = World::new("");
    for (command, code) in [
        ("no-such-program", 127),
        ("/no/such/program", 127),
        ("/etc/passwd", 126),
        ("/etc", 126),
    ] {
        let output = world.run(&["tiny", "--", command]);
        assert_eq!(output.status.code(), Some(code), "{command}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(command), "{}", text(&output.stderr));
    }
    for (flag, value, next) in [
        ("--user", "no-such-user", "or a number such as 1000"),
        ("--user", "root:no-such-group", "or a number such as 1000"),
        ("--workdir", "/no/such/place", "give one that exists"),
    ] {
        let output = world.run(&[flag, value, "tiny"]);
        assert_eq!(output.status.code(), Some(125));
        let stderr = text(&output.stderr);
        let named = value.rsplit(':').next().unwrap();
        assert!(stderr.contains(named) && stderr.contains(next), "{stderr}");
    }
}

fn the_images_own_command_environment_and_directory() {
    let output = World::new("").run(&["tiny"]);
    assert_eq!(
        text(&output.stdout),
        "the image\n/usr\n12\n",
        "{}",
        text(&output.stderr)
    );
}

fn flags_win_over_the_image() {
    let world = World::new("");
    let file = world.path("env");
    std::fs::write(&file, "# from a file\nB=file\nC=file\n").unwrap();
    let script = "echo $A $B $C $D; pwd; id -u; id -g";
    let args = [
        "--env-file",
        file.to_str().unwrap(),
        "-e",
        "C=flag",
        "-e",
        "D",
        "-w",
        "/tmp",
        "-u",
        "12:34",
        "tiny",
    ];
    let mut command = world.command(&["run"]);
    let output = command
        .args(args)
        .args(["--", "sh", "-c", script])
        .env("D", "host")
        .output()
        .unwrap();
    assert_eq!(
        text(&output.stdout),
        "1 file flag host\n/tmp\n12\n34\n",
        "{}",
        text(&output.stderr)
    );
    let output = world.run(&["--entrypoint", "echo", "tiny", "a", "--b"]);
    assert_eq!(text(&output.stdout), "a --b\n");
}

fn streams_are_separate_and_binary_clean() {
    let world = World::new("");
    let bytes: Vec<u8> = (0..=255).cycle().take(5 << 20).collect();
    let mut run = world.start(&["tiny", "--", "sh", "-c", "cat; printf '\\377' >&2"]);
    let mut stdin = run.0.stdin.take().unwrap();
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).unwrap());
    let mut received = Vec::new();
    run.0.stdout.take().unwrap().read_to_end(&mut received).unwrap();
    writer.join().unwrap();
    assert!(
        received == bytes,
        "{} bytes came back of {}",
        received.len(),
        bytes.len()
    );
    let mut stderr = Vec::new();
    run.0.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
    assert_eq!(stderr, [0xff]);
    assert_eq!(run.end().0, Some(0));
}

fn no_input_where_none_is_wanted() {
    let world = World::new("");
    let mut run = world.start(&["--interactive=false", "tiny", "--", "cat"]);
    // Our end stays open: the command's input ends all the same.
    assert_eq!(run.end().0, Some(0));
}

fn signals_reach_the_command() {
    let world = World::new("");
    for (signal, name) in [
        (Signal::TERM, "TERM"),
        (Signal::INT, "INT"),
        (Signal::HUP, "HUP"),
        (Signal::QUIT, "QUIT"),
    ] {
        let script = format!("trap 'echo got {name}; exit 5' {name}; echo ready; while :; do sleep 0.01; done");
        let mut run = world.start(&["tiny", "--", "sh", "-c", &script]);
        assert_eq!(run.line(), "ready");
        run.signal(signal);
        assert_eq!(run.line(), format!("got {name}"));
        assert_eq!(run.end().0, Some(5));
    }
    let mut run = world.start(&["tiny", "--", "sh", "-c", "echo ready; exec sleep 100"]);
    assert_eq!(run.line(), "ready");
    run.signal(Signal::TERM);
    assert_eq!(run.end().0, Some(143));
}

fn time_limits_end_the_command() {
    let begun = Instant::now();
    let output = World::new("").run(&[
        "--timeout",
        // Time enough to say something first.
        "10s",
        "tiny",
        "--",
        "sh",
        "-c",
        "echo on; exec sleep 10000",
    ]);
    assert_eq!(output.status.code(), Some(124));
    assert_eq!(text(&output.stdout), "on\n");
    assert!(
        text(&output.stderr).contains("ended after 10s"),
        "{}",
        text(&output.stderr)
    );
    assert!(begun.elapsed() < std::time::Duration::from_secs(1000));
}

fn a_reader_that_leaves_ends_the_writer() {
    let world = World::new("");
    let mut run = world.start(&["tiny", "--", "sh", "-c", "yes; echo $? >&2"]);
    assert_eq!(run.line(), "y");
    drop(run.0.stdout.take());
    let (code, stderr) = run.end();
    // The shell that tells it has the same standard output and goes on: it does not write to it.
    assert_eq!((code, stderr.trim()), (Some(0), "141"));
}

fn a_terminal_has_size_keys_and_interrupt() {
    let world = World::new("");
    let mut terminal = world.start_on_terminal(&["tiny", "--", "sh"], 40, 100);
    terminal.type_in("stty size; echo $TERM\n");
    terminal.expect("40 100");
    terminal.expect("vt100");
    terminal.resize(50, 120);
    // The size comes some time after this terminal's has changed.
    terminal.type_in("until test \"$(stty size)\" = '50 120'; do sleep 0.01; done; echo it''fits\n");
    terminal.expect("itfits");
    terminal.type_in("PS1=ready'':\n");
    terminal.expect("ready:");
    terminal.type_in("sh -c 'echo go; exec sleep 100'\n");
    terminal.expect("\ngo");
    // The key that interrupts. It also throws away what is typed before the shell has taken it, hence the wait.
    terminal.type_in("\x03");
    terminal.expect("ready:");
    terminal.type_in("echo still''here\n");
    terminal.expect("stillhere");
    terminal.type_in("exit 7\n");
    assert_eq!(terminal.child.end().0, Some(7));
}

fn a_killed_vmm_is_one_sentence_and_leaves_nothing() {
    let world = World::new("");
    let mut run = world.start(&["tiny", "--", "sh", "-c", "echo ready; exec sleep 100"]);
    assert_eq!(run.line(), "ready");
    kill(world.vmm());
    let (code, stderr) = run.end();
    assert_eq!(code, Some(125));
    assert!(
        stderr.contains("the VMM died while its command was running"),
        "{stderr}"
    );
    assert!(stderr.contains("run it again"), "{stderr}");
}

fn a_killed_basalt_takes_its_vmm_with_it() {
    let world = World::new("");
    let mut run = world.start(&["tiny", "--", "sh", "-c", "echo ready; exec sleep 100"]);
    assert_eq!(run.line(), "ready");
    let vmm = world.vmm();
    assert!(is_alive(vmm));
    run.signal(Signal::KILL);
    assert_eq!(run.end().0, None);
    wait_for("the VMM to be gone", || (!is_alive(vmm)).then_some(()));
}

fn a_signal_while_booting_ends_it() {
    let world = World::new("silent");
    let mut run = world.start(&["tiny", "--", "true"]);
    let vmm = world.vmm();
    // Until its handlers are in place a signal simply ends the program, which is as good.
    run.signal(Signal::INT);
    let (code, stderr) = run.end();
    assert_eq!(code, Some(130), "{stderr}");
    assert!(stderr.contains("interrupted by signal 2"), "{stderr}");
    wait_for("the VMM to be gone", || (!is_alive(vmm)).then_some(()));
    wait_for("the sandbox to be gone", || {
        world.verb(&["ps", "-aq"]).stdout.is_empty().then_some(())
    });
}

fn a_kernel_panic_is_shown() {
    let output = World::new("panic").run(&["tiny", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("the guest's kernel panicked"), "{stderr}");
    assert!(
        stderr.contains("| [    0.1] Kernel panic - not syncing: no init"),
        "{stderr}"
    );
    assert!(stderr.contains("--log-level debug"), "{stderr}");
}

fn a_refused_vm_is_explained() {
    let output = World::new("refuse").run(&["tiny", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let stderr = text(&output.stderr);
    assert_eq!(
        stderr,
        "basalt: the VM cannot be made: the kernel is truncated: build it again\n"
    );
}

fn more_memory_than_the_host_has_is_refused() {
    let output = World::new("").run(&["--memory", "900t", "tiny", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("900 TiB of memory were asked for, but this host has"),
        "{stderr}"
    );
    assert!(stderr.contains("ask for less"), "{stderr}");
}

pub(crate) fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}
