//! What can be written, what it means, and what is refused.

use super::*;

fn parsed(words: &[&str]) -> Result<Command> {
    parse_from(lexopt::Parser::from_args(words))
}

fn work(words: &[&str]) -> Work {
    match parsed(words) {
        Ok(Command::Manage(_, work)) => work,
        other => panic!("{other:?}"),
    }
}

fn own(domain: &str, listen: &str, public: &str) -> Names {
    Names {
        domain: domain.parse().unwrap(),
        tls: Some(TlsOptions {
            listen: listen.parse().unwrap(),
            certificate: Certificate::Own { public: public.into() },
        }),
        dns: None,
    }
}

fn names(words: &[&str]) -> Names {
    match parsed(&[&["--state", "/s"], words].concat()) {
        Ok(Command::Serve(options)) => options.names.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_are_served_by_tls_unless_something_else_does() {
    assert_eq!(
        names(&["--domain", "sb.example"]),
        own("sb.example", "127.0.0.1:443", "/s")
    );
    let words = [
        "--domain",
        "sb.example",
        "--tls",
        "0.0.0.0:8443",
        "--ca-dir",
        "/c",
        "--dns",
        "127.0.0.55:53",
    ];
    let served = names(&words);
    assert_eq!(served.dns, Some("127.0.0.55:53".parse().unwrap()));
    assert_eq!(served.tls, own("sb.example", "0.0.0.0:8443", "/c").tls);
    let files = names(&["--domain", "example", "--tls-cert", "/c.pem", "--tls-key", "/k.pem"]);
    let certificate = Certificate::Files {
        certificate: "/c.pem".into(),
        key: "/k.pem".into(),
    };
    assert_eq!(files.tls.unwrap().certificate, certificate);
    assert_eq!(names(&["--domain", "sb.example", "--tls", "off"]).tls, None);
}

#[test]
fn each_way_to_call_it() {
    assert!(matches!(parsed(&["openapi"]), Ok(Command::Document)));
    let Ok(Command::Serve(options)) = parsed(&[]) else {
        panic!()
    };
    assert_eq!(options.listen.to_string(), "127.0.0.1:3000");
    assert_eq!((options.names, options.log_level), (None, LevelFilter::Info));
    let words = [
        "--listen",
        "[::1]:1",
        "--domain",
        "sb.example:8443",
        "--rate=7",
        "--volume-size=2G",
        "--volumes=3",
        "--memory-budget=1G",
        "--state",
        "/s",
        "--node-socket",
        "/n",
    ];
    let Ok(Command::Serve(options)) = parsed(&words) else {
        panic!()
    };
    assert_eq!(
        (options.names, options.state),
        (Some(own("sb.example:8443", "127.0.0.1:8443", "/s")), "/s".into())
    );
    assert_eq!((options.limits.rate.get(), options.limits.burst.get()), (7, 14));
    assert_eq!((options.volumes.size, options.volumes.most), (ByteSize::gib(2), 3));
    assert_eq!(options.memory_budget, 1 << 30);
    assert_eq!(
        work(&["keys", "create", "--tenant", "a", "--name", "ci", "--json"]),
        Work::CreateKey {
            tenant: "a".into(),
            name: "ci".into(),
            json: true
        }
    );
    let Ok(Command::Environment(_, environment)) = parsed(&["env", "--json", "--tenant", "a", "--ca-dir", "/c"]) else {
        panic!()
    };
    assert_eq!((environment.tenant.as_deref(), environment.json), (Some("a"), true));
    assert_eq!(environment.public, Some("/c".into()));
    assert!(matches!(parsed(&["ca"]), Ok(Command::Authority { json: false, .. })));
    assert_eq!(
        work(&["keys", "list"]),
        Work::ListKeys {
            tenant: None,
            json: false
        }
    );
    assert_eq!(work(&["keys", "revoke", "0a"]), Work::RevokeKey { id: "0a".into() });
    assert_eq!(work(&["tenants", "list", "--json"]), Work::ListTenants { json: true });
    let quota = Quota {
        sandboxes: Some(3),
        vcpus: None,
        memory: Some(1 << 30),
        volumes: Some(4),
        volume_space: Some(20 << 30),
    };
    let words = "tenants set a --sandboxes 3 --memory 1G --volumes 4 --volume-space 20G";
    let words: Vec<&str> = words.split(' ').collect();
    assert_eq!(
        work(&words),
        Work::SetTenant {
            tenant: "a".into(),
            quota
        }
    );
    assert_eq!(
        work(&["audit", "--limit", "5"]),
        Work::Audit {
            tenant: None,
            limit: 5,
            json: false
        }
    );
}

#[test]
fn what_makes_no_sense_is_refused() {
    for words in [
        &["serve"][..],
        &["openapi", "now"],
        &["keys"],
        &["keys", "revoke"],
        &["keys", "list", "--listen", "127.0.0.1:1"],
        &["--tenant", "a"],
        &["--sandboxes", "3"],
        &["--listen", "3000"],
        &["--domain", "Sb.example"],
        &["--domain", "a..b"],
        &["--domain", "a:b"],
        &["--domain", "a.b:0"],
        &["--domain", "example"],
        &["--tls", "127.0.0.1:1"],
        &["--dns", "127.0.0.1:53"],
        &["--domain", "a.b", "--tls", "443"],
        &["--domain", "a.b", "--tls", "off", "--tls-cert", "/c", "--tls-key", "/k"],
        &["--domain", "a.b", "--tls-cert", "/c"],
        &["--domain", "a.b", "--dns", "192.0.2.1:53"],
        &["env", "--domain", "a.b"],
        &["keys", "list", "--ca-dir", "/c"],
        &["--rate", "0"],
        &["--log-level", "loud"],
        &["tenants", "set", "a", "--memory", "much"],
        &["tenants", "list", "--volumes", "3"],
        &["--volume-space", "3G"],
        &["--memory-budget", "1M"],
        &["keys", "list", "--memory-budget", "1G"],
    ] {
        assert!(parsed(words).is_err(), "{words:?}");
    }
    for address in ["0.0.0.0:3000", "[::]:3000", "192.0.2.1:3000"] {
        let error = parsed(&["--listen", address]).unwrap_err().to_string();
        assert!(error.contains(address) && error.contains("TLS"), "{error}");
    }
}
