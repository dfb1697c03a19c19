//! Flags as they are given, and what is said of wrong ones.

use super::*;
use crate::carrier::LIBRARY;

fn parsed(words: &[&str]) -> Result<Options> {
    match parse_from(lexopt::Parser::from_args(words))? {
        Command::Serve(options) => Ok(*options),
        Command::Print(text) => panic!("{text}"),
    }
}

#[test]
fn what_is_not_said_is_what_the_help_says() {
    let options = parsed(&["--socket", "a.sock", "--backend", "opencl"]).unwrap();
    assert_eq!(options.backend, Carrier::Opencl(LIBRARY.into()));
    assert_eq!((options.arena.0, options.threads), (256 << 20, 32));
    assert!(HELP.contains("256m") && HELP.contains("; 32\n") && HELP.contains(LIBRARY));
    assert!(!options.transports.contains(&Transport::Synchronous));
    let limits = options.limits;
    assert!(limits.memory.is_none() && limits.arbiter.is_none() && limits.in_flight.is_none());
    assert!(!limits.measures_time && options.control.is_none());
    let options = parsed(&["--socket=a", "--backend=null", "--transports=spin,bell", "--arena=1m"]).unwrap();
    assert_eq!(options.transports, [Transport::Spin, Transport::Bell]);
    assert!(options.backend.library().is_none() && options.arena.0 == 1 << 20);
    let options = parsed(&["--socket=a", "--backend=reference"]).unwrap();
    assert_eq!(options.backend, Carrier::Reference);
    let words = ["--memory=2g", "--arbiter=b", "--inflight=16", "--control=c"];
    let options = parsed(&[&["--socket=a", "--backend=null"][..], &words].concat()).unwrap();
    let limits = options.limits;
    assert_eq!((limits.memory, limits.in_flight), (Some(2 << 30), Some(16)));
    assert_eq!((limits.arbiter, options.control), (Some("b".into()), Some("c".into())));
    assert!(limits.measures_time);
    let jailed = [
        "--socket=a",
        "--backend=null",
        "--jail",
        "--arbiter=/run/share/one/socket",
    ];
    assert_eq!(
        parsed(&jailed).unwrap().jail.unwrap().read_only,
        [PathBuf::from("/run/share/one")]
    );
}

#[test]
fn an_arbiter_and_statistics_can_come_by_descriptors() {
    let guest = [
        "--backend=null",
        "--vsock-fd=3",
        "--window-fd=4",
        "--driver-fd=5",
        "--musl-driver-fd=9",
        "--ready-fd=6",
    ];
    let with = |more: &[&str]| parsed(&[&guest[..], more].concat());
    let options = with(&["--arbiter-fd=7", "--control-fd=8"]).unwrap();
    let Place::Guest(fds) = options.place else {
        panic!("{options:?}")
    };
    assert_eq!((fds.arbiter, fds.control), (Some(7), Some(8)));
    assert_eq!(options.limits.arbiter, Some("/proc/self/fd/7/socket".into()));
    assert!(!options.limits.measures_time, "that is what the arbiter is for");
    let options = with(&["--arbiter-fd=7", "--jail"]).unwrap();
    assert_eq!(options.limits.arbiter, Some("/run/arbiter/socket".into()));
    assert!(options.jail.unwrap().read_only.is_empty(), "it is a mount of its own");
    for (words, part) in [
        (&["--arbiter-fd=7", "--arbiter=a"][..], "two arbiters"),
        (&["--control-fd=7", "--control=a"], "leave one out"),
    ] {
        let error = format!("{:#}", with(words).unwrap_err());
        assert!(error.contains(part), "{words:?}: {error}");
    }
    let error = parsed(&["--socket=a", "--backend=null", "--arbiter-fd=7"]).unwrap_err();
    assert!(error.to_string().contains("--ready-fd together"), "{error}");
}

#[test]
fn who_listens_for_other_machines_has_certificates_or_says_that_it_has_none() {
    let place = |words: &[&str]| parsed(&[&["--backend=null"], words].concat()).unwrap().place;
    assert!(matches!(place(&["--listen=127.0.0.1:7070"]), Place::Remote(_, None)));
    assert!(matches!(
        place(&["--listen=0.0.0.0:7070", "--without-tls"]),
        Place::Remote(_, None)
    ));
    let Place::Remote(address, Some(certificates)) =
        place(&["--listen=[::]:7070", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a"])
    else {
        panic!("no certificates");
    };
    assert_eq!(address.port(), 7070);
    assert_eq!(certificates.own.key, PathBuf::from("k"));
    assert_eq!(certificates.clients, Some("a".into()));
}

#[test]
fn errors_say_what_to_do() {
    for (words, part) in [
        (&["--backend", "null"][..], "--socket is missing"),
        (&["--backend", "null", "--vsock-fd", "3"], "together"),
        (
            &["--socket", "a", "--backend", "null", "--save-fd", "7"],
            "which --save-fd, --restore-fd",
        ),
        (&["--backend", "null", "--restore-fd", "7"], "--ready-fd together"),
        (
            &["--socket", "a", "--listen", "[::1]:0", "--backend", "null"],
            "or --listen",
        ),
        (&["--listen", "example.org", "--backend", "null"], "0.0.0.0:7070"),
        (
            &["--listen=[::1]:0", "--backend=null", "--jail", "--arbiter=/run/share"],
            "connects to nothing",
        ),
        (&["--listen", "0.0.0.0:0", "--backend", "null"], "--without-tls"),
        (
            &["--listen", "[::1]:0", "--backend", "null", "--tls-client-ca", "c"],
            "--tls-cert",
        ),
        (
            &["--listen", "[::1]:0", "--backend", "null", "--tls-cert", "c"],
            "together",
        ),
        (
            &["--socket", "a", "--backend", "null", "--tls-cert", "c"],
            "are for --listen",
        ),
        (
            &[
                "--listen=[::1]:0",
                "--backend=null",
                "--tls-cert=c",
                "--tls-key=k",
                "--without-tls",
            ],
            "leave one of the two out",
        ),
        (&["--socket", "a"], "null to try without a driver"),
        (
            &["--socket", "a", "--backend", "rocm"],
            "there are opencl, cuda, reference and null",
        ),
        (
            &["--socket", "a", "--backend", "cuda", "--library", "/usr/lib:lib"],
            "directories from / on",
        ),
        (
            &["--socket=a", "--backend=reference", "--library=b"],
            "for --backend opencl",
        ),
        (
            &["--socket", "a", "--backend", "null", "--library", "b"],
            "leave one of the two out",
        ),
        (&["--socket", "a", "--backend", "null", "--threads", "0"], "1 to 1024"),
        (&["--socket", "a", "--backend", "null", "--arena", "100"], "whole pages"),
        (&["--socket", "a", "--backend", "null", "--memory", "0"], "such as 2g"),
        (&["--socket", "a", "--backend", "null", "--inflight", "0"], "1 to 4096"),
        (
            &["--socket", "a", "--backend", "null", "--jail", "--arbiter", "b"],
            "a path from / on",
        ),
        (
            &["--socket", "a", "--backend", "null", "--transports", "spin,pigeon"],
            "--transports spin,pigeon",
        ),
    ] {
        let error = format!("{:#}", parsed(words).unwrap_err());
        assert!(error.contains(part), "{words:?}: {error}");
    }
}

#[test]
fn windows_of_clients_that_enter_are_all_that_there_is() {
    let parsed = |words: &[&str]| parse_from(lexopt::Parser::from_args(words));
    let Ok(Command::Serve(options)) = parsed(&["--passive", "/a", "--backend", "null", "--passive", "/b"]) else {
        panic!("it is not understood")
    };
    assert!(matches!(options.place, Place::Passive(paths) if paths == ["/a", "/b"].map(PathBuf::from)));
    for more in [["--socket", "/c"], ["--listen", "127.0.0.1:1"], ["--ready-fd", "3"]] {
        let words = [["--passive", "/a"], ["--backend", "null"], more].concat();
        assert!(
            parsed(&words)
                .unwrap_err()
                .to_string()
                .contains("--passive is for itself"),
            "{more:?}"
        );
    }
    for more in [["--arbiter", "/c"], ["--inflight", "9"], ["--control", "/c"]] {
        let words = [["--passive", "/a"], ["--backend", "null"], more].concat();
        let refused = parsed(&words).unwrap_err().to_string();
        assert!(refused.contains("nothing waits for time there"), "{more:?}: {refused}");
    }
}
