//! What a gateway asks on its socket about sandboxes of one tenant and of another: what they use, and what their start was made of.

use std::thread;

use node_api::message::Item;
use node_api::{BriefUsage, Client, ClientError, Pool, Reply, Request, SnapshotConfig};

use super::World;
use crate::api::server::Server;

/// A gateway's connection for a tenant.
fn connect(world: &World, tenant: &str) -> Client {
    let mut client = Client::connect(&world.node().paths.gateway_socket()).unwrap();
    client.for_tenant(tenant);
    client
}

fn usage(client: &mut Client) -> Vec<BriefUsage> {
    let mut all = Vec::new();
    let mut each = |item| match item {
        Item::BriefUsage(some) => all.extend(some),
        other => panic!("{other:?}"),
    };
    let (reply, _) = client.ask_each(Request::ListUsage, &mut each).unwrap();
    assert_eq!(reply, Reply::Done);
    all
}

fn trace(client: &mut Client, id: &str) -> Result<Vec<String>, ClientError> {
    match client.ask(Request::Trace { sandbox: id.to_owned() })? {
        (Reply::Trace(spans), _) => Ok(spans.into_iter().map(|span| span.name).collect()),
        (other, _) => panic!("{other:?}"),
    }
}

/// The names of what is told to be ready, and how many interfaces are.
fn pools(client: &mut Client) -> (Vec<String>, Option<u64>) {
    let (mut names, mut interfaces) = (Vec::new(), None);
    let mut each = |item| match item {
        Item::Pool(Pool::Interfaces { ready, size }) => {
            assert!(ready <= size);
            interfaces = Some(ready);
        }
        Item::Pool(Pool::Memory { name, size, cached, .. }) => {
            assert!(cached.is_none_or(|cached| cached <= size), "{name}");
            names.push(name);
        }
        other => panic!("{other:?}"),
    };
    let (reply, _) = client.ask_each(Request::ListPools, &mut each).unwrap();
    assert_eq!(reply, Reply::Done);
    (names, interfaces)
}

#[test]
fn what_is_ready_is_told_to_the_tenant_who_can_use_it() {
    let world = World::new();
    let server = Server::bind(world.node().clone()).unwrap();
    let stop = server.stopper();
    let serves = thread::spawn(move || server.serve());
    let (mut one, mut other) = (connect(&world, "one"), connect(&world, "other"));
    assert_eq!(
        pools(&mut one),
        (Vec::new(), None),
        "nothing is made for who only looks"
    );
    let mut admin = Client::connect(&world.node().paths.socket()).unwrap();
    admin.for_tenant("one");
    admin.ask(Request::Run(Box::new(World::config("web")))).unwrap();
    let templates = pools(&mut other).0;
    let config = SnapshotConfig {
        sandbox: "web".into(),
        name: Some("kept".into()),
        detach_devices: false,
    };
    one.ask(Request::MakeSnapshot(config)).unwrap();
    let its = pools(&mut one).0;
    assert!(its.contains(&"kept".to_owned()), "{its:?}");
    assert_eq!(its.len(), templates.len() + 1);
    assert_eq!(pools(&mut other).0, templates, "others have not that snapshot");
    drop((admin, one, other));
    stop.signal();
    serves.join().unwrap().unwrap();
}

#[test]
fn use_and_traces_are_told_to_the_tenant_whose_they_are() {
    let world = World::new();
    let server = Server::bind(world.node().clone()).unwrap();
    let stop = server.stopper();
    let serves = thread::spawn(move || server.serve());
    let (mut one, mut other) = (connect(&world, "one"), connect(&world, "other"));
    // One that boots is the administrator's to make, for a tenant too.
    let mut admin = Client::connect(&world.node().paths.socket()).unwrap();
    admin.for_tenant("one");
    let run = Request::Run(Box::new(World::config("web")));
    let (Reply::Started { sandbox, .. }, _) = admin.ask(run).unwrap() else {
        panic!("it does not run")
    };
    let id = sandbox.id;

    let all = usage(&mut one);
    assert_eq!((all.len(), &all[0].id), (1, &id));
    // Where the host counts nothing, nothing is made up.
    let cgroup = world.node().cgroup(&world.entry("web")).unwrap();
    let is_counted = cgroup.is_some_and(|cgroup| cgroup.usage().unwrap().memory.is_some());
    let started_ns = is_counted.then_some(sandbox.started_ns).flatten();
    assert_eq!(all[0].used.map(|used| used.started_ns), started_ns);
    assert_eq!(usage(&mut other), []);

    let names = trace(&mut one, &id).unwrap();
    assert_eq!(names.last().map(String::as_str), Some("create and start"));
    assert!(names.iter().any(|name| name == "VMM process"), "{names:?}");
    let refused = trace(&mut other, &id).unwrap_err();
    assert!(refused.to_string().contains("no sandbox"), "{refused}");

    // One that is suspended uses nothing, and is there; when it goes on, that is its last start.
    let sandbox = id.clone();
    one.ask(Request::Suspend { sandbox }).unwrap();
    assert_eq!(
        usage(&mut one),
        [BriefUsage {
            id: id.clone(),
            used: None
        }]
    );
    one.ask(Request::Resume { sandbox: id.clone() }).unwrap();
    let names = trace(&mut one, &id).unwrap();
    assert_eq!(names.last().map(String::as_str), Some("resume"));
    one.ask(Request::Remove {
        sandbox: id.clone(),
        force: true,
    })
    .unwrap();
    assert_eq!(usage(&mut one), []);
    assert!(trace(&mut one, &id).is_err());

    drop((admin, one, other));
    stop.signal();
    serves.join().unwrap().unwrap();
}
