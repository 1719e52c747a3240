//! `docs/openapi.json` is what the program says of itself.

use serde_json::Value;

use crate::support::{ALICE, Daemon};

#[tokio::test]
async fn the_published_description_is_the_programs_own() {
    let daemon = Daemon::new().await;
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let now = warren_api::rest::description(&daemon.api);
    if std::env::var_os("WARREN_BLESS").is_some() {
        std::fs::write(path, &now).expect("docs/openapi.json can be written");
    }
    let published = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        published == now,
        "docs/openapi.json is stale: WARREN_BLESS=1 cargo test -p warren-api"
    );
    let served = daemon.call(ALICE, "GET", "/v1/openapi.json", Value::Null).await.expect(200);
    assert_eq!(served, serde_json::from_str::<Value>(&now).unwrap());
}
