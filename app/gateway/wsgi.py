"""What gunicorn serves: `gunicorn -c python:app.gateway.gunicorn_conf app.gateway.wsgi:app`."""

from app.gateway.gateway import create_app
from relay import log
from relay.settings import Settings

log.configure()
app = create_app(Settings.from_env())
