//! Every call, command and refusal is noted, and no secret is.

use std::collections::HashMap;

use serde_json::{Value, json};
use warren_api::audit::{self, Limits};
use warren_api::keys::Quotas;

use crate::support::{ALICE, BOB, Daemon, ROOT, echo, read, tcp};

/// Ends the daemon and returns what it noted.
async fn noted(daemon: Daemon) -> Vec<Value> {
    let state = daemon.end().await;
    let directory = state.path().join("audit");
    let report = audit::verify(&directory).expect("a log");
    assert!(report.intact, "{report:?}");
    let mut records = Vec::new();
    audit::read(&audit::list(&directory).expect("files"), |_, record| {
        records.push(record);
        true
    })
    .expect("lines");
    assert_eq!(records[0]["kind"], "start");
    assert_eq!(records.last().expect("a last line")["kind"], "stop");
    records
}

#[tokio::test]
async fn every_call_is_noted_with_who_what_which_and_the_result() {
    let daemon = Daemon::audited().await;
    let key = daemon.key("carol", Quotas { sandboxes: Some(1), ..Quotas::default() });
    let id = daemon.keys().list().unwrap()[0].id.clone();
    let on_tcp = [("host", "127.0.0.1:8080"), ("x-api-key", key.as_str())];
    let made = daemon.open(tcp(), "POST", "/v1/sandboxes", Vec::new(), &on_tcp).await;
    let made_as = made.headers()["x-request-id"].to_str().unwrap().to_owned();
    let made = read(made).await.expect(201);
    let (sandbox, session) = (&made["sandbox"]["id"], &made["session"]["id"]);
    let path = format!("/v1/sandboxes/{}", sandbox.as_str().unwrap());
    let over = daemon.call_with(tcp(), "POST", "/v1/sandboxes", json!({}), &on_tcp).await;
    assert_eq!(over.status, 429);
    assert_eq!(daemon.call(BOB, "GET", &path, Value::Null).await.status, 404);
    assert_eq!(daemon.call(BOB, "GET", "/v1/sandboxes/sbx-none", Value::Null).await.status, 404);
    let none = [("host", "127.0.0.1:8080"), ("x-api-key", "wrn_wrong")];
    assert_eq!(daemon.call_with(tcp(), "GET", &path, Value::Null, &none).await.status, 401);
    assert_eq!(daemon.call(ALICE, "POST", "/v1/cleanup", Value::Null).await.status, 403);
    daemon.call(ROOT, "GET", "/v1/health", Value::Null).await.expect(200);
    let files = format!("{path}/files?path=/a%20b&signature=s3cret");
    daemon.call_with(tcp(), "GET", &files, Value::Null, &on_tcp).await;

    let calls: Vec<Value> = noted(daemon).await;
    let of = |kind: &str, status: u16| {
        let found = calls.iter().find(|one| one["kind"] == kind && one["status"] == status);
        found.unwrap_or_else(|| panic!("{kind} {status}: {calls:#?}")).clone()
    };
    let create = of("call", 201);
    assert_eq!((&create["tenant"], &create["key"]), (&json!("tenant:carol"), &json!(id)));
    assert_eq!((&create["sandbox"], &create["session"]), (sandbox, session));
    assert_eq!((&create["method"], &create["path"]), (&json!("POST"), &json!("/v1/sandboxes")));
    assert_eq!((&create["peer"], &create["request"]), (&json!("127.0.0.1:50000"), &json!(made_as)));
    let over = of("denial", 429);
    assert_eq!((&over["tenant"], &over["code"]), (&json!("tenant:carol"), &json!("quota")));
    let foreign = of("denial", 404);
    assert_eq!((&foreign["foreign"], &foreign["sandbox"]), (&json!(true), sandbox));
    assert_eq!(
        (&foreign["tenant"], &foreign["code"]),
        (&json!("uid:4000002"), &json!("not_found"))
    );
    let unknown = calls.iter().find(|one| one["sandbox"] == "sbx-none").unwrap();
    assert_eq!((&unknown["kind"], &unknown["foreign"]), (&json!("denial"), &Value::Null));
    let nobody = of("denial", 401);
    assert_eq!((&nobody["tenant"], &nobody["key"]), (&Value::Null, &Value::Null));
    assert_eq!(of("denial", 403)["code"], "forbidden");
    assert_eq!(of("call", 200)["path"], "/v1/health");
    let file = calls.iter().find(|one| one["file"] == "/a b").expect("a file is named");
    assert_eq!(file["path"], format!("{path}/files"));
    assert!(!serde_json::to_string(&calls).unwrap().contains("s3cret"));
}

#[tokio::test]
async fn a_command_is_noted_before_it_runs_and_never_what_it_is_given() {
    const SECRET: &str = "hunter2-hunter2";
    let daemon = Daemon::audited().await;
    let (sandbox, _) = daemon.create(ALICE, json!({ "environment": { "A": SECRET } })).await;
    let path = format!("/v1/sandboxes/{sandbox}");
    let command = json!({
        "program": "echo", "args": ["hi", "there"], "env": { "TOKEN": SECRET }, "stdin": SECRET,
    });
    daemon.call(ALICE, "POST", &format!("{path}/exec"), command.clone()).await;
    let start = json!({ "id": "mine", "command": command });
    daemon.call(ALICE, "POST", &format!("{path}/execs"), start).await;
    let shell = json!({ "command": "echo hi", "env": { "TOKEN": SECRET }, "stdin": SECRET });
    daemon.call(ALICE, "POST", &format!("{path}/shells/main/run"), shell).await;
    let headers = [("authorization", format!("Bearer {SECRET}"))];
    let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
    daemon.call_with(ALICE, "GET", &format!("{path}?key={SECRET}"), Value::Null, &headers).await;
    let write = format!("{path}/files?path=/x");
    daemon.send(ALICE, "PUT", &write, SECRET.as_bytes().to_vec(), &[]).await;
    let records = noted(daemon).await;
    assert!(!serde_json::to_string(&records).unwrap().contains(SECRET));
    let execs: Vec<&Value> = records.iter().filter(|one| one["kind"] == "exec").collect();
    assert_eq!(execs.len(), 3, "{records:#?}");
    let names: Vec<&Value> = execs.iter().map(|one| &one["name"]).collect();
    assert_eq!(names, [&Value::Null, &json!("mine"), &json!("main")]);
    for (exec, line) in
        execs.iter().zip([&["echo", "hi", "there"][..], &["echo", "hi", "there"], &["echo hi"]])
    {
        assert_eq!(exec["command"], json!(line));
        assert_eq!((&exec["tenant"], &exec["sandbox"]), (&json!("uid:4000001"), &json!(sandbox)));
        assert_eq!(exec["variables"], json!(["TOKEN"]));
    }
    // The call that asked for each is noted after it, by the same name.
    let place: HashMap<_, _> = records
        .iter()
        .enumerate()
        .filter(|(_, one)| one["kind"] == "call")
        .map(|(at, one)| (one["request"].as_str().unwrap(), at))
        .collect();
    for exec in execs {
        let at = records.iter().position(|one| one == exec).unwrap();
        assert!(place[exec["request"].as_str().unwrap()] > at);
    }
}

#[tokio::test]
async fn every_command_that_is_noted_has_an_end_that_is_by_the_same_request() {
    const SECRET: &str = "hunter2-hunter2";
    let daemon = Daemon::audited().await;
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    let path = format!("/v1/sandboxes/{sandbox}/exec");
    let run = |program: &str, args: Value| json!({ "program": program, "args": args });
    for body in [run("sh", json!(["-c", "exit 3"])), run("echo", json!([SECRET]))] {
        daemon.call(ALICE, "POST", &path, body).await.expect(200);
    }
    let start = json!({ "id": "mine", "command": echo() });
    let start = daemon.call(ALICE, "POST", &format!("/v1/sandboxes/{sandbox}/execs"), start).await;
    assert_eq!(start.code(), "unsupported", "control: this backend has no execs with a log");
    let shell = format!("/v1/sandboxes/{sandbox}/shells/main/run");
    daemon.call(ALICE, "POST", &shell, json!({ "command": "true" })).await;
    daemon.call(ALICE, "POST", "/v1/run", json!({ "command": echo() })).await.expect(200);
    let records = noted(daemon).await;
    let of = |kind: &str| records.iter().filter(|one| one["kind"] == kind).collect::<Vec<_>>();
    let (execs, ends) = (of("exec"), of("end"));
    assert_eq!((execs.len(), ends.len()), (5, 5), "{records:#?}");
    for exec in execs {
        let own: Vec<_> = ends.iter().filter(|end| end["request"] == exec["request"]).collect();
        let [end] = own[..] else { panic!("{exec}: {own:#?}") };
        for same in ["tenant", "sandbox", "name"] {
            assert_eq!(end[same], exec[same], "{same}: {end}");
        }
        assert_eq!(end["client"], "default");
        let place = |wanted: &Value| records.iter().position(|one| one == wanted).unwrap();
        assert!(place(exec) < place(end));
    }
    let how = |at: usize| (&ends[at]["cause"], &ends[at]["exit_code"], &ends[at]["code"]);
    assert_eq!(how(0), (&json!({ "kind": "exited", "code": 3 }), &json!(3), &Value::Null));
    assert_eq!(how(1).1, &json!(0));
    assert_eq!(how(2), (&Value::Null, &Value::Null, &json!("unsupported")));
    assert_eq!(how(3).2, &json!("unsupported"));
    assert!(!serde_json::to_string(&ends).unwrap().contains(SECRET), "nothing that it wrote");
}

#[tokio::test]
async fn whoever_has_no_key_cannot_push_out_of_the_log_what_others_did() {
    // Room for some hundreds of lines.
    let limits = Limits { file_bytes: 32 << 10, total_bytes: 128 << 10 };
    let flooded = async |headers: &[(&str, &str)], key: bool| {
        let daemon = Daemon::audited_within(limits).await;
        let own = daemon.key("mallory", Quotas::default());
        let (sandbox, _) = daemon.create(ALICE, json!({})).await;
        let as_mallory = [("host", "127.0.0.1:8080"), ("x-api-key", own.as_str())];
        for _ in 0..3_000 {
            let headers = if key { &as_mallory } else { headers };
            daemon.call_with(tcp(), "GET", "/v1/sandboxes/x", Value::Null, headers).await;
        }
        let state = daemon.end().await;
        let directory = state.path().join("audit");
        let report = audit::verify(&directory).expect("a log");
        assert!(report.intact, "{report:?}");
        let mut records = Vec::new();
        let mut keep = |record| {
            records.push(record);
            true
        };
        audit::read(&audit::list(&directory).expect("files"), |_, one| keep(one)).expect("lines");
        (sandbox, records)
    };
    let (sandbox, control) = flooded(&[], true).await;
    let made = |records: &[Value], sandbox: &str| {
        records.iter().any(|one| one["sandbox"] == sandbox && one["status"] == 201)
    };
    assert!(!made(&control, &sandbox), "control: that many lines push out the first");
    for headers in [
        &[("host", "127.0.0.1:8080")][..],
        &[("host", "127.0.0.1:8080"), ("x-api-key", "wrn_wrong")],
        &[("host", "evil.example")],
        &[("origin", "https://evil.example")],
    ] {
        let (sandbox, records) = flooded(headers, false).await;
        assert!(made(&records, &sandbox), "{headers:?}");
        let single = records.iter().filter(|one| one["kind"] == "denial").count() as u64;
        assert!((1..100).contains(&single), "the first are there: {single}");
        let sums: Vec<_> = records.iter().filter(|one| one["kind"] == "strangers").collect();
        let counted: u64 = sums.iter().filter_map(|one| one["count"].as_u64()).sum();
        assert_eq!(single + counted, 3_000, "each is counted: {sums:#?}");
        assert_eq!(sums[0]["peers"][0]["peer"], "127.0.0.1");
        let status = sums[0]["groups"][0]["status"].as_u64();
        assert!(status == Some(401) || status == Some(403), "{sums:#?}");
        assert!(sums[0]["since"].as_str() <= sums[0]["until"].as_str());
    }
}

#[tokio::test]
async fn one_who_hangs_up_is_noted_too() {
    let daemon = Daemon::audited().await;
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    daemon.backend.stall(warren::backend::fake::Step::Exec, warren::backend::fake::When::Always);
    let path = format!("/v1/sandboxes/{sandbox}/exec");
    let run = daemon.call(ALICE, "POST", &path, json!({ "program": "true" }));
    let hangs_up = async {
        while daemon.backend.stalled(warren::backend::fake::Step::Exec) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        answer = run => panic!("{answer:?}"),
        () = hangs_up => {}
    }
    daemon.backend.release(warren::backend::fake::Step::Exec);
    let records = noted(daemon).await;
    let call = records.iter().find(|one| one["kind"] == "call" && one["path"] == path.as_str());
    let call = call.unwrap_or_else(|| panic!("{records:#?}"));
    assert_eq!((&call["status"], &call["sandbox"]), (&Value::Null, &json!(sandbox)));
    let end = records.iter().find(|one| one["kind"] == "end").expect("the command was given up");
    assert_eq!((&end["code"], &end["request"]), (&json!("given_up"), &call["request"]));
}

#[tokio::test]
async fn nothing_is_done_while_it_cannot_be_noted() {
    let daemon = Daemon::audited().await;
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    let log = daemon.state.path().join("audit");
    let away = daemon.state.path().join("away");
    std::fs::rename(&log, &away).unwrap();
    let path = format!("/v1/sandboxes/{sandbox}");
    // The seal has nowhere to go, and then nothing is answered but this.
    let refused = loop {
        let answer = daemon.call(ALICE, "GET", &path, Value::Null).await;
        match answer.status {
            200 => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            _ => break answer,
        }
    };
    assert_eq!((refused.status, refused.code().as_str()), (503, "audit_unavailable"));
    assert_eq!(daemon.call(ALICE, "DELETE", &path, Value::Null).await.status, 503);
    assert_eq!(daemon.backend.counts().live, 1, "and nothing was done");
    daemon.call(ROOT, "GET", "/v1/health", Value::Null).await.expect(200);
    std::fs::rename(&away, &log).unwrap();
    loop {
        let answer = daemon.call(ALICE, "DELETE", &path, Value::Null).await;
        match answer.status {
            503 => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            status => break assert_eq!(status, 204),
        }
    }
    noted(daemon).await;
}

#[tokio::test]
async fn calls_of_e2bs_clients_are_noted_as_well() {
    let daemon = Daemon::audited().await.speaking_e2b().await;
    let key = daemon.key("alice", Quotas::default());
    let other = daemon.key("mallory", Quotas::default());
    let as_alice = [("host", "127.0.0.1:8080"), ("x-api-key", key.as_str())];
    let as_mallory = [("host", "127.0.0.1:8080"), ("x-api-key", other.as_str())];
    let body = json!({ "templateID": "base", "secure": true });
    let made = daemon.call_with(tcp(), "POST", "/sandboxes", body, &as_alice).await.expect(201);
    let id = made["sandboxID"].as_str().unwrap();
    let token = made["envdAccessToken"].as_str().unwrap();
    let path = format!("/sandboxes/{id}");
    assert_eq!(daemon.call_with(tcp(), "GET", &path, Value::Null, &as_mallory).await.status, 404);
    let traffic = [
        ("e2b-sandbox-id", id),
        ("e2b-sandbox-port", "49983"),
        ("x-access-token", token),
        ("content-type", "application/connect+json"),
    ];
    let message =
        json!({ "process": { "cmd": "echo", "args": ["hi"], "envs": { "A": "s3cret" } } });
    let message = message.to_string();
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    frame.extend(message.as_bytes());
    daemon.send(tcp(), "POST", "/process.Process/Start", frame, &traffic).await;
    let port = [("e2b-sandbox-id", id), ("e2b-sandbox-port", "8080")];
    daemon.send(tcp(), "GET", "/private?token=s3cret", Vec::new(), &port).await;
    daemon.send(tcp(), "PUT", "/templates/files/s3cret", Vec::new(), &[]).await;
    let (id, token) = (id.to_owned(), token.to_owned());
    let records = noted(daemon).await;
    let text = serde_json::to_string(&records).unwrap();
    assert!(!text.contains("s3cret") && !text.contains(&token) && !text.contains("private"));
    let at = |path: &str| {
        let found = records.iter().find(|one| one["path"] == path);
        found.unwrap_or_else(|| panic!("{path}: {records:#?}"))
    };
    assert_eq!(
        (&at("/sandboxes")["kind"], &at("/sandboxes")["tenant"]),
        (&json!("call"), &json!("tenant:alice"))
    );
    let foreign = at(&format!("/sandboxes/{id}"));
    assert_eq!((&foreign["kind"], &foreign["foreign"]), (&json!("denial"), &json!(true)));
    assert_eq!(foreign["tenant"], "tenant:mallory");
    let start = at("/process.Process/Start");
    assert_eq!((&start["status"], &start["tenant"]), (&json!(200), &json!("tenant:alice")));
    let exec = records.iter().find(|one| one["kind"] == "exec").expect("the command is noted");
    assert_eq!((&exec["command"], &exec["variables"]), (&json!(["echo", "hi"]), &json!(["A"])));
    assert_eq!((&exec["sandbox"], &exec["request"]), (&start["sandbox"], &start["request"]));
    let port = records.iter().find(|one| one["port"] == 8080).expect("traffic is noted");
    assert_eq!((&port["path"], &port["sandbox"]), (&json!(""), &start["sandbox"]));
    assert_eq!(at("/templates/files/...")["method"], "PUT");
    // Each once, though routers are inside one another.
    let requests: Vec<_> = records
        .iter()
        .filter(|one| one["kind"] == "call" || one["kind"] == "denial")
        .filter_map(|one| one["request"].as_str())
        .collect();
    let unique: std::collections::HashSet<_> = requests.iter().collect();
    assert_eq!(requests.len(), unique.len());
}
