//! What a gateway asks on its socket: for tenants, of which each has its own sandboxes and snapshots, and for nothing that reaches the host.

use std::os::unix::fs::PermissionsExt;

use base::ByteSize;
use node_api::message::Item;
use node_api::tenant_volume::TenantVolumeRequest;
use node_api::{
    Client, CloneConfig, ErrorKind, ListConfig, ProcessConfig, Reply, Request, SandboxConfig, SnapshotConfig,
};

use crate::world::{World, done};

pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "a_gateway_reaches_its_tenants_sandboxes_and_nothing_else",
        tenants_are_apart,
    ),
    (
        "an_administrator_lists_and_removes_tenants_volumes",
        volumes_of_tenants_are_administered,
    ),
    ("a_sandbox_too_large_for_a_packet_hides_no_other", too_large_for_a_list),
];

/// A gateway that asks for one tenant.
struct Gateway(Client);

impl Gateway {
    fn new(world: &World, tenant: Option<&str>) -> Self {
        let mut client = Client::connect(&world.path("state").join(node_api::GATEWAY_SOCKET)).unwrap();
        tenant.into_iter().for_each(|tenant| client.for_tenant(tenant));
        Self(client)
    }

    fn ask(&mut self, request: Request) -> Reply {
        self.0.ask(request).unwrap().0
    }

    #[track_caller]
    fn refused(&mut self, request: Request) -> (ErrorKind, String) {
        match self.0.ask(request.clone()) {
            Err(node_api::ClientError::Refused(why)) => (why.kind, why.message),
            other => panic!("{request:?}: {other:?}"),
        }
    }

    fn names(&mut self, request: Request) -> Vec<String> {
        let mut names = Vec::new();
        let mut each = |item| match item {
            Item::Sandbox(sandbox) => names.push(sandbox.name),
            Item::Snapshot(snapshot) => names.push(snapshot.name),
            Item::Sample(sample) => names.push(sample.name),
            other => panic!("{other:?}"),
        };
        self.0.ask_each(request, &mut each).unwrap();
        names
    }
}

/// As an administrator's that has no command, for a tenant.
fn idle(of: &SandboxConfig, name: &str) -> Request {
    Request::Run(Box::new(SandboxConfig {
        name: Some(name.to_owned()),
        process: ProcessConfig {
            idle: true,
            ..ProcessConfig::default()
        },
        boot: false,
        detach: true,
        ..of.clone()
    }))
}

/// What can be asked about a sandbox.
fn about(sandbox: &str, snapshot: &SnapshotConfig) -> [Request; 9] {
    let sandbox = sandbox.to_owned();
    [
        Request::Inspect {
            sandbox: sandbox.clone(),
        },
        Request::Exec {
            sandbox: sandbox.clone(),
        },
        Request::Logs {
            sandbox: sandbox.clone(),
        },
        Request::Stats {
            sandbox: Some(sandbox.clone()),
        },
        Request::Suspend {
            sandbox: sandbox.clone(),
        },
        Request::SetTimeLimit {
            sandbox: sandbox.clone(),
            ms: None,
            then: None,
        },
        Request::UpdateNetwork {
            sandbox: sandbox.clone(),
            egress: base::Egress::default(),
        },
        Request::MakeSnapshot(SnapshotConfig {
            sandbox: sandbox.clone(),
            ..snapshot.clone()
        }),
        Request::Remove {
            sandbox: sandbox.clone(),
            force: true,
        },
    ]
}

fn tenants_are_apart() {
    let world = World::new("can be kept");
    done(
        &world,
        &["run", "-d", "--disk", "0", "--name", "mine", "--no-command", "tiny"],
    );
    let mode = std::fs::metadata(world.path("state").join(node_api::GATEWAY_SOCKET))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut admin = Client::connect(&world.path("state").join(node_api::SOCKET)).unwrap();
    let sandbox = "mine".to_owned();
    let (Reply::Sandbox(mine), _) = admin.ask(Request::Inspect { sandbox }).unwrap() else {
        panic!()
    };
    let (config, mine) = (mine.config, mine.id);
    assert!(config.process.idle && config.owner.is_none());

    let mut nobody = Gateway::new(&world, None);
    let (kind, why) = nobody.refused(idle(&config, "x"));
    assert!(kind == ErrorKind::Invalid && why.contains("tenant"), "{why}");
    let (mut one, mut two) = (Gateway::new(&world, Some("one")), Gateway::new(&world, Some("two")));
    for request in [Request::Prune, Request::Quit { clean: false }, Request::ListVolumes] {
        let (_, why) = one.refused(request);
        assert!(why.contains("basaltd.sock"), "{why}");
    }
    let Reply::Started { sandbox: a, .. } = one.ask(idle(&config, "a")) else {
        panic!()
    };
    assert_eq!(a.config.owner.as_deref(), Some("one"));
    two.ask(idle(&config, "b"));
    let snapshot = SnapshotConfig {
        sandbox: a.id.clone(),
        name: Some("s".to_owned()),
        detach_devices: false,
    };
    one.ask(Request::MakeSnapshot(snapshot.clone()));

    assert_eq!(one.names(Request::List(ListConfig::all())), ["a"]);
    assert_eq!(two.names(Request::List(ListConfig::all())), ["b"]);
    assert_eq!(two.names(Request::Stats { sandbox: None }), ["b"]);
    assert_eq!(nobody.names(Request::List(ListConfig::all())), ["a", "b"]);
    assert_eq!(
        (
            one.names(Request::ListSnapshots).len(),
            two.names(Request::ListSnapshots).len()
        ),
        (1, 0)
    );
    // What is another tenant's, or the administrator's, is as what is not there.
    let sandbox = a.id.clone();
    for sandbox in [sandbox, mine, "000000000000".to_owned()] {
        for request in about(&sandbox, &snapshot) {
            let (kind, why) = two.refused(request);
            assert!(kind == ErrorKind::NotFound && why.contains(&sandbox), "{why}");
        }
    }
    let cloned = CloneConfig {
        snapshot: "s".to_owned(),
        env: vec!["A=b".to_owned()],
        workdir: Some("/tmp".to_owned()),
        user: Some("1".to_owned()),
        ..CloneConfig::default()
    };
    assert_eq!(two.refused(Request::Clone(cloned.clone())).0, ErrorKind::NotFound);
    assert_eq!(
        two.refused(Request::RemoveSnapshot { name: "s".to_owned() }).0,
        ErrorKind::NotFound
    );
    let Reply::Started { sandbox: twin, .. } = one.ask(Request::Clone(cloned)) else {
        panic!()
    };
    assert_eq!(twin.config.owner.as_deref(), Some("one"));
    // Commands in it have what was asked for.
    let sandbox = twin.id.clone();
    let Reply::Agent { command, .. } = one.ask(Request::Exec { sandbox }) else {
        panic!()
    };
    assert_eq!((command.cwd, command.user.as_deref()), ("/tmp".into(), Some("1")));
    assert!(command.env.contains(&"A=b".into()), "{:?}", command.env);
    for sandbox in [a.id.clone(), twin.id] {
        one.ask(Request::Remove { sandbox, force: true });
    }
    // An administrator has all of them.
    assert_eq!(done(&world, &["ps", "--quiet"]).lines().count(), 2);
    done(&world, &["rm", "--force", "mine", "b"]);
    done(&world, &["snapshot", "rm", "s"]);
}

fn volumes_of_tenants_are_administered() {
    let world = World::new("");
    done(&world, &["volume", "create", "own"]);
    let make = |tenant: &str, name: &str| {
        let asked = TenantVolumeRequest::Make {
            name: name.to_owned(),
            size: ByteSize::mib(16),
            most: 9,
            most_space: None,
        };
        Gateway::new(&world, Some(tenant)).ask(Request::TenantVolume(asked));
    };
    make("two", "data");
    make("one", "data");
    make("one", "more");
    let rows = |words: &[&str]| -> Vec<String> {
        let text = done(&world, words);
        let rows = text.lines().skip(1).map(|row| row.split_whitespace().take(4));
        rows.map(|row| row.collect::<Vec<_>>().join(" ")).collect()
    };
    let all = rows(&["volume", "ls", "--tenants"]);
    assert_eq!(all, ["one data 16 MiB", "one more 16 MiB", "two data 16 MiB"]);
    assert_eq!(rows(&["volume", "ls", "--tenant", "two"]), ["two data 16 MiB"]);
    let own = done(&world, &["volume", "ls"]);
    assert!(own.contains("own") && own.lines().count() == 2, "{own}");
    let shown = done(&world, &["volume", "inspect", "--tenant", "two", "data"]);
    assert!(shown.contains("\"tenant\": \"two\""), "{shown}");
    let refused = world.verb(&["volume", "rm", "--tenant", "two", "more"]);
    assert!(!refused.status.success(), "another tenant has it");
    done(&world, &["volume", "rm", "--tenant", "one", "data", "more"]);
    assert_eq!(rows(&["volume", "ls", "--tenants"]), ["two data 16 MiB"]);
    // A gateway asks for one tenant.
    let (kind, why) = Gateway::new(&world, None).refused(Request::TenantVolume(TenantVolumeRequest::List));
    assert!(kind == ErrorKind::Invalid && why.contains("tenant"), "{why}");
    done(&world, &["volume", "rm", "--tenant", "two", "data"]);
    done(&world, &["volume", "rm", "own"]);
}

/// Its request is just small enough, and what is told of it is not.
fn too_large_for_a_list() {
    let world = World::new("");
    done(
        &world,
        &["run", "-d", "--disk", "0", "--name", "a", "--no-command", "tiny"],
    );
    let mut admin = Client::connect(&world.path("state").join(node_api::SOCKET)).unwrap();
    let sandbox = "a".to_owned();
    let (Reply::Sandbox(a), _) = admin.ask(Request::Inspect { sandbox }).unwrap() else {
        panic!()
    };
    let mut config = a.config;
    (config.name, config.boot) = (Some("b".into()), true);
    let small = serde_json::to_vec(&config).unwrap().len();
    let label = "x".repeat(wire::packet::MAX_PACKET - small - 200);
    config.labels.insert("l".into(), label);
    let told = admin
        .ask(Request::Run(Box::new(config.clone())))
        .unwrap_err()
        .to_string();
    assert!(told.contains("cannot be sent"), "{told}");
    (config.name, config.labels) = (Some("c".into()), [].into());
    admin.ask(Request::Run(Box::new(config))).unwrap();
    let listed = done(&world, &["ps"]);
    assert!(listed.contains(" a ") && listed.contains(" c "), "{listed}");
    done(&world, &["rm", "--force", "a", "b", "c"]);
}
