"""What gunicorn serves: `gunicorn -c python:app.gunicorn_conf app.wsgi:app`."""

from app.gateway import create_app
from relay import log
from relay.settings import Settings

log.configure()
app = create_app(Settings.from_env())
